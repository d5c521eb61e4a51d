"""One model with every kind of layer whose names differ between frameworks, written in each of them; and what one rank
does with a checkpoint of it. Run by `test_checkpoint_portable`, where pytest may not be installed."""

import sys
from pathlib import Path

import numpy as np

import unidist

SPECS = {
    "sgd": unidist.SGD(lambda update: 0.2 / (1 + update), momentum=0.9, weight_decay=0.01),
    "adam": unidist.Adam(0.02),
    "adamw": unidist.AdamW(0.02, weight_decay=0.1),
}
SAMPLES, BATCH = 24, 8  # three steps make an epoch


def data():
    dice = np.random.RandomState(3)
    return (
        dice.randn(SAMPLES, 2, 5, 5).astype(np.float32),
        dice.randint(0, 7, (SAMPLES, 6)).astype(np.int64),
        dice.randn(SAMPLES, 3).astype(np.float32),
    )


def in_torch_style(nn, cat):
    """torch's, and OneFlow's, which has the same names."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)  # Adam would blow up its gradient, which is noise
            self.batch = nn.BatchNorm2d(4)
            self.rise = nn.PReLU()
            self.embed = nn.Embedding(7, 8)
            self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
            self.layer = nn.LayerNorm(12)
            self.head = nn.Linear(16, 3)

        def forward(self, image, tokens):
            seen = self.rise(self.batch(self.conv(image))).mean(dim=(2, 3))
            read = self.layer(self.lstm(self.embed(tokens))[0].mean(dim=1))
            return self.head(cat([seen, read], dim=1))

    return Model()


def in_gluon():
    import mxnet as mx
    from mxnet.gluon import Block, nn, rnn

    class Model(Block):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2D(4, 3, padding=1, in_channels=2, use_bias=False)
            self.batch = nn.BatchNorm(in_channels=4)
            self.rise = nn.PReLU()
            self.embed = nn.Embedding(7, 8)
            self.lstm = rnn.LSTM(6, num_layers=2, bidirectional=True, layout="NTC", input_size=8)
            self.layer = nn.LayerNorm(in_channels=12)
            self.head = nn.Dense(3, in_units=16)

        def forward(self, image, tokens):
            seen = self.rise(self.batch(self.conv(image))).mean(axis=(2, 3))
            read = self.layer(self.lstm(self.embed(tokens)).mean(axis=1))
            return self.head(mx.nd.concat(seen, read, dim=1))

    model = Model()
    model.initialize(mx.init.Uniform(0.3))
    return model


def build(framework):
    if framework == "mxnet":
        return in_gluon()
    if framework == "oneflow":
        import oneflow as flow

        return in_torch_style(flow.nn, flow.cat)
    import torch

    torch.manual_seed(0)
    return in_torch_style(torch.nn, torch.cat)


def loss(model, image, tokens, target):
    return ((model(image, tokens) - target) ** 2).mean()


def main(folder, *sources):
    """From each source ("" is a new model), for each optimizer: what the model says, and what it says after training
    goes on. Writes `<source>+<engine>-<spec>` checkpoints and the predictions beside them."""
    folder = Path(folder)
    with unidist.Strategy() as strategy:
        engine = f"{strategy.backend}_{strategy.framework}"
        for source in sources:
            for kind, spec in SPECS.items():
                model, optimizer = strategy.prepare(build(strategy.framework), spec)
                loader = strategy.loader(data(), global_batch=BATCH, shuffle=True, seed=1)
                if source:
                    strategy.load(folder / f"{source}-{kind}", model=model, optimizer=optimizer, loader=loader)
                place = folder / f"{source}+{engine}-{kind}"
                tell(strategy, model, place.with_suffix(".loaded.npy"))
                step = strategy.train_step(model, optimizer, loss)
                for batch in loader:
                    step(*batch)
                strategy.save(place, model=model, optimizer=optimizer, loader=loader)
                tell(strategy, model, place.with_suffix(".trained.npy"))


def tell(strategy, model, file):
    ordered = strategy.loader(data(), global_batch=BATCH)
    said = strategy.predict(model, ordered, lambda m, batch: m(*batch[:2]))
    if strategy.is_main:
        np.save(file, said)


if __name__ == "__main__":
    main(*sys.argv[1:])
