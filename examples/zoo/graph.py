"""torch_geometric's GIN classifies graphs of unequal size; a batch is one large graph, an object."""

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import BatchNorm, GINConv, GraphNorm, global_add_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24)))
        self.batch_norm = BatchNorm(24)  # over the nodes of all graphs
        self.second = GINConv(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24)))
        self.graph_norm = GraphNorm(24)  # over the nodes of each graph
        self.out = nn.Linear(24, 3)

    def forward(self, graphs):
        x = self.batch_norm(self.first(graphs.x, graphs.edge_index)).relu()
        x = self.graph_norm(self.second(x, graphs.edge_index), graphs.batch).relu()
        return self.out(global_add_pool(x, graphs.batch))


def build():
    torch.manual_seed(0)
    return Net().double()


class Molecules(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        draw, nodes = generator(index), 4 + index % 7
        x = torch.randn(nodes, 5, generator=draw, dtype=torch.float64)
        ends = torch.randint(nodes, (2, 2 * nodes), generator=draw)
        return Data(x=x, edge_index=torch.cat([ends, ends.flip(0)], dim=1), y=torch.tensor(index % 3))


def plain(epochs, report):
    model, data = build(), Molecules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=Batch.from_data_list)
    for _ in range(epochs):
        for graphs in loader:
            loss = nn.functional.cross_entropy(model(graphs), graphs.y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Molecules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    collate = Batch.from_data_list
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for graphs in run.batches():
            loss = nn.functional.cross_entropy(run.model(graphs), graphs.y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Molecules()
    if accelerator.num_processes > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=Batch.from_data_list)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for graphs in loader:
            loss = nn.functional.cross_entropy(model(graphs), graphs.y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
