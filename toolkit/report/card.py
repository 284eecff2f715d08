def write_card(*a):
    pass
