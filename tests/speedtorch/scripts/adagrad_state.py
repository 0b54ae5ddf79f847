# Word vectors by Adagrad. Both tables are on the GPU; the optimizer's weights, as large again, are in pinned memory.
import sys

import numpy as np
import SpeedTorch
import torch
from SpeedTorch.CUPYLive import ModelFactory, OptimizerFactory

rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2829853
dim = int(sys.argv[2]) if len(sys.argv) > 2 else 400
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100
batch, pos, neg = (int(sys.argv[4]), 2, 6) if len(sys.argv) > 4 else (128, 4, 128)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
np.random.seed(1)
torch.manual_seed(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.given = torch.nn.Embedding(batch, dim, sparse=True)
        self.context = torch.nn.Embedding(batch * (pos + neg), dim, sparse=True)

    def forward(self, given, positive, negative):
        given = self.given(given)
        near = (given * self.context(positive)).sum(2)
        far = (given * self.context(negative)).sum(2)
        return -(torch.nn.functional.logsigmoid(near).mean() + torch.nn.functional.logsigmoid(-far).mean())


net = Model().to(device)
given_switcher = ModelFactory(net.given, rows, dim)
given_switcher.uniformDistributionInit(low=-0.1, high=0.1)
context_switcher = ModelFactory(net.context, rows, dim)
context_switcher.zerosInit()

given_optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
given_adagrad = OptimizerFactory(given_optimizer, rows, dim, net, "given", dtype="float32", CPUPinn=True)
given_adagrad.optInit()
context_adagrad = OptimizerFactory(given_optimizer, rows, dim, net, "context", dtype="float32", CPUPinn=True)
context_adagrad.optInit()

given_slots = torch.from_numpy(given_switcher.variableTransformer(batch, 1)).to(device)
positive_slots, negative_slots = [
    torch.from_numpy(slots).to(device) for slots in context_switcher.variableTransformer(batch, pos, neg)
]

losses = []
for step in range(steps):
    given = np.random.choice(rows, (batch, 1), replace=True)
    positive = np.random.choice(rows, (batch, pos), replace=True)
    negative = np.random.choice(rows, (batch, neg), replace=True)
    with torch.no_grad():
        given_switcher.beforeForwardPass(given)
        given_adagrad.beforeForwardPass(given)
        context_switcher.beforeForwardPass(positive, negative)
        context_adagrad.beforeForwardPass(positive, negative)
    given_optimizer.zero_grad()
    loss = net(given_slots, positive_slots, negative_slots)
    loss.backward()
    given_optimizer.step()
    with torch.no_grad():
        given_switcher.afterOptimizerStep(given)
        given_adagrad.afterOptimizerStep(given)
        context_switcher.afterOptimizerStep(positive, negative)
        context_adagrad.afterOptimizerStep(positive, negative)
    losses.append(loss.item())

print("loss", np.mean(losses[:5]), np.mean(losses[-5:]))
given_switcher.saveCupy("given")
np.save("context.npy", context_switcher.getNumpyVersion())
np.save("losses.npy", losses)
np.save(
    "sums.npy",
    [SpeedTorch.COM(1).total_classes, *(abs(state.CUPYcorpi[0]).sum().item() for state in (given_adagrad, context_adagrad))],
)
del given_adagrad, context_adagrad
