"""1,797 real handwritten digits of 8 x 8 pixels, shipped with scikit-learn: nothing is downloaded."""

import numpy as np
from sklearn.datasets import load_digits


def load():
    """((images, labels) to learn from, (images, labels) held out): every fifth digit is held out."""
    data = load_digits()
    images = (data.images[:, None] / 16.0).astype(np.float32)  # samples, channel, height, width
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], data.target[~held_out]), (images[held_out], data.target[held_out])
