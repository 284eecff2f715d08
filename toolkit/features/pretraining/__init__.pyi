from .data import masked_evaluation as masked_evaluation
from .data import masked_metrics as masked_metrics
from .model import load_masked_model as load_masked_model
from .model import masked_sums as masked_sums
