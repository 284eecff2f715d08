from .evaluation import Writer as Writer
from .evaluation import title_evaluation as title_evaluation
from .evaluation import title_metrics as title_metrics
from .model import load_title_model as load_title_model
