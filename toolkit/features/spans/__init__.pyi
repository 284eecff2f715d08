from .decoding import predict_tags as predict_tags
from .decoding import word_losses as word_losses
from .evaluation import span_evaluation as span_evaluation
from .metrics import span_metrics as span_metrics
from .model import load_tagger as load_tagger
