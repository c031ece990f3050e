"""Trained models by what they can do: classify, tag, translate, continue, embed, answer.

    model = polyformer.load("runs/sst2-1")
    model.classify("a gripping, funny film")        # Prediction(label='1', probability=0.98, ...)
    model.classify([Path("review.txt"), "dull"])    # a list of predictions

The class of the object depends on the task of the run, or on the head of the checkpoint. The commands of the
command line call the same methods.
"""

from polyformer.applications.loaded.base import Choice, LoadedModel, Prediction, TaggedWord, Verbatim
from polyformer.applications.loaded.load import load, load_for

__all__ = ["Choice", "LoadedModel", "Prediction", "TaggedWord", "Verbatim", "load", "load_for"]
