"""Which class of transformers loads a saved model."""

from __future__ import annotations

from pathlib import Path


def architecture(model_folder: Path) -> str:
    """The class in a saved model's config.json; "" if it cannot load the weights: a model that is
    not of transformers, or whose head or layers the recipe replaced."""
    if not (model_folder / "config.json").is_file():
        return ""
    import transformers  # takes seconds

    from toolkit.pretrained import quiet_transformers, whole_weights

    try:
        config = transformers.AutoConfig.from_pretrained(
            model_folder, trust_remote_code=False
        )
    except ValueError:  # the model type is not known
        return ""
    name = str((config.architectures or [""])[0])
    model_class = getattr(transformers, name, None)
    if model_class is None:
        return ""
    with whole_weights(), quiet_transformers():
        _, problems = model_class.from_pretrained(
            model_folder,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    if problems["missing_keys"] or problems["mismatched_keys"]:
        return ""
    return name
