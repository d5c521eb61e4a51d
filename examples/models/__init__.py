"""The examples' model, once for each framework, with the same initial weights in all of them."""

import importlib

import numpy as np

SHAPES = {
    "conv1.weight": (8, 1, 3, 3),
    "conv1.bias": (8,),
    "conv2.weight": (16, 8, 3, 3),
    "conv2.bias": (16,),
    "output.weight": (10, 64),
    "output.bias": (10,),
}


def load(framework):
    """The module that holds `cnn`, `cross_entropy` and `correct` in this framework."""
    return importlib.import_module(f"models.{framework}")


def initial_weights(seed):
    """Drawn by NumPy, so that every framework begins at the same point."""
    numbers = np.random.RandomState(seed)
    scale = {name: np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.0 for name, shape in SHAPES.items()}
    return {name: (scale[name] * numbers.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
