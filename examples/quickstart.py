"""Fine-tune a vision transformer on digits with forward passes only, without backward."""

import torch
import torch.nn.functional as F
from rich.progress import track

from flops import ForwardGradient
from flops.tasks.classification import accuracy, bundled_vit, digits

EPOCHS, BATCH = 5, 64
data = digits()
model = bundled_vit(classes=10)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)


def loss_fn(outputs, targets):  # one loss per point: reduction="none"
    return F.cross_entropy(outputs.logits, targets, reduction="none")


fg = ForwardGradient(model, loss_fn, seed=0)
order = torch.Generator().manual_seed(0)
for epoch in range(EPOCHS):
    batches = torch.randperm(len(data.train), generator=order).split(BATCH)
    for rows in track(batches, description=f"epoch {epoch + 1}/{EPOCHS}"):
        optimizer.zero_grad()
        report = fg.estimate(data.train.images[rows], data.train.labels[rows])  # not .backward()
        optimizer.step()
    score = accuracy(model, data.validation)
    print(f"epoch {epoch + 1}: loss {report.loss:.2f}, validation accuracy {score:.1%}")
