"""Foreign checkpoints, and a run's own, as a Hugging Face folder that `from_pretrained` loads.

    convert       what is written under which name, and whether all of it is there
    open          which format a path has; a run's checkpoint, Hugging Face's folders and files
    deepspeed     ZeRO's folders: names and places in the ranks' flat buffers
    distributed   folders of torch.distributed.checkpoint, such as FSDP's
    torch_files   files of torch.save, mapped and not executed; their checksums
    model_class   the names and shapes that the config's class has today
    lora          adapters, merged layer by layer by peft
    stored        what all of these hand on: tensors that are read one at a time
    write         safetensors files, config and tokenizer

A leaf: only its command and, when it is called, `toolkit.convert` import it.
"""
