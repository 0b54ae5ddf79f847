# Books that are read together lie near each other: two tables, negative sampling, SGD.
# One table on the GPU, the other in pinned memory, as it does not fit beside it.
import sys

import cupy  # noqa: F401  # before torch, as SpeedTorch's page asks
import numpy as np
import SpeedTorch
import torch
import torch.nn as nn
import torch.nn.functional as F

rows = int(sys.argv[1]) if len(sys.argv) > 1 else 14886544
dim = int(sys.argv[2]) if len(sys.argv) > 2 else 188
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100
batch, pos, neg = (int(sys.argv[4]), 4, 8) if len(sys.argv) > 4 else (512, 4, 132)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
np.random.seed(0)
torch.manual_seed(0)


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u_embeddings = nn.Embedding(batch, dim)
        self.v_embeddings = nn.Embedding(batch, dim)

    def forward(self, u, v, negative):
        u = self.u_embeddings(u)
        score = torch.bmm(self.v_embeddings(v), u.transpose(1, 2)).squeeze(2)
        negative_score = torch.bmm(self.v_embeddings(negative), u.transpose(1, 2)).squeeze(2)
        return -(F.logsigmoid(score).sum(1) + F.logsigmoid(-negative_score).sum(1)).mean()


model = SkipGram().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

u_switcher = SpeedTorch.GPUPytorchModelFactory(model.u_embeddings, rows, dim)
u_switcher.uniformDistributionInit(-0.5 / dim, 0.5 / dim)
v_switcher = SpeedTorch.ModelFactory(
    model.v_embeddings, total_classes=rows, embed_dimension=dim, datatype="float32", CPUPinn=True
)
v_switcher.normalDistributionInit(0, 0.01)

(u_slots) = u_switcher.variableTransformer(batch, 1)
(v_slots, negative_slots) = v_switcher.variableTransformer(batch, pos, neg)
u_slots = torch.from_numpy(u_slots).long().to(device)
v_slots = torch.from_numpy(v_slots).long().to(device)
negative_slots = torch.from_numpy(negative_slots).long().to(device)

# Momentum of slots is of no use when the rows in them change.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

losses = []
for step in range(steps):
    labels = np.random.randint(0, rows, (batch, 1)).astype(np.int32)
    together = np.random.randint(0, rows, (batch, pos)).astype(np.int32)
    negz = np.random.randint(0, rows, (batch, neg)).astype(np.int32)
    with torch.no_grad():
        u_switcher.beforeForwardPass(labels)
        v_switcher.beforeForwardPass(together, negz)
    optimizer.zero_grad()
    loss = model(u_slots, v_slots, negative_slots)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        u_switcher.afterOptimizerStep(labels)
        v_switcher.afterOptimizerStep(together, negz)
    losses.append(loss.item())

print("loss", np.mean(losses[:5]), np.mean(losses[-5:]))
u_switcher.saveTorch("u.pt")
v_switcher.saveCupy("v.cpy")
np.save("u_final.npy", u_switcher.getNumpyVersion())
np.save("losses.npy", losses)
