"""The models that examples of several pages import, as `from model import Net`."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.decoder = nn.Linear(8, 16)
