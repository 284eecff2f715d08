from .api import convert as convert
from .api import evaluate as evaluate
from .api import predict as predict
from .api import settings as settings
from .api import wait_for_all as wait_for_all
from .data.tokens import Split as Split
from .evaluation.metrics import classification_metrics as classification_metrics
from .evaluation.outputs import Evaluation as Evaluation
from .evaluation.outputs import Outputs as Outputs
from .launch import make_accelerator as make_accelerator
from .models.classifier import load_classifier as load_classifier
from .models.to_bigbird import long_model as long_model
from .objective import make_objective as make_objective
from .objective.losses import Objective as Objective
from .objective.losses import sample_losses as sample_losses
from .objective.losses import token_losses as token_losses
from .pretrained import whole_weights as whole_weights
from .run import Run as Run
from .training.optimizer import make_optimizer as make_optimizer
from .training.optimizer import parameter_groups as parameter_groups
from .training.steps import Step as Step
from .utils.modules import unwrapped as unwrapped

__version__: str
