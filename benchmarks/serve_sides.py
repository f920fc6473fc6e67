"""The other sides of `benchmarks/serve.py`: the same DLRM in two other services.

    python benchmarks/serve_sides.py ray PORT        Ray Serve, as Ray's makers published it
    uvicorn serve_sides:app                          FastAPI and torch, a minimal service

Both services take {"dense": [[13 numbers] …], "sparse": [[26 ids] …]} and return {"score": […]}.
"""

import sys
import time
from itertools import pairwise

import torch
from fastapi import FastAPI, Request
from pydantic import BaseModel
from torch import nn

DENSE, FEATURES, ROWS, DIM = 13, 26, 100_000, 64
HOST = "127.0.0.1"


class Dlrm(nn.Module):
    """DLRM of Ray's benchmark, with 26 tables of 100,000 rows and dim 64, and MLPs 256-64 and 256-128-64."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(FEATURES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 256), nn.ReLU(), nn.Linear(256, DIM), nn.ReLU())
        n = 1 + FEATURES
        sizes = [DIM + n * (n - 1) // 2, 256, 128, 64]
        layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())]
        self.top = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        rows, columns = torch.triu_indices(n, n, 1)
        self.register_buffer("pairs", rows * n + columns)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return the score of each row, float32 [B]."""
        x = self.bottom(dense)
        looked_up = [table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return torch.sigmoid(self.top(torch.cat([x, products], 1))).squeeze(1)


class Body(BaseModel):
    """Request body with rows as lists."""

    dense: list[list[float]]
    sparse: list[list[int]]


app, model = FastAPI(), None


@app.post("/predict")
async def predict(body: Body) -> dict[str, list[float]]:
    """Return the scores of a request's rows."""
    global model
    if model is None:
        torch.set_num_threads(1)
        model = Dlrm().eval()
    with torch.inference_mode():
        return {"score": model(torch.tensor(body.dense), torch.tensor(body.sparse)).tolist()}


def serve_on_ray(port: int) -> None:
    """Serve an ingress and a model that waits up to 50 ms for a batch of 100 requests."""
    from ray import serve

    from raytrec.cluster.session import ray_session

    @serve.deployment(ray_actor_options={"num_cpus": 0.5}, max_ongoing_requests=400)
    class Model:
        def __init__(self):
            torch.set_num_threads(1)
            self.model = Dlrm().eval()

        @serve.batch(max_batch_size=100, batch_wait_timeout_s=0.05)
        async def __call__(self, requests: list[dict]) -> list[list[float]]:
            dense = torch.tensor([row for each in requests for row in each["dense"]])
            sparse = torch.tensor([row for each in requests for row in each["sparse"]])
            with torch.inference_mode():
                scores = self.model(dense, sparse)
            return [part.tolist() for part in scores.split([len(each["dense"]) for each in requests])]

    ingress = FastAPI()

    @serve.deployment(ray_actor_options={"num_cpus": 0.5}, max_ongoing_requests=400)
    @serve.ingress(ingress)
    class Ingress:
        def __init__(self, model):
            self.model = model

        @ingress.post("/predict")
        async def predict(self, request: Request) -> dict[str, list[float]]:
            return {"score": await self.model.remote(await request.json())}

    with ray_session(num_cpus=2):  # a local Ray cluster on loopback
        serve.start(http_options={"host": HOST, "port": port})
        serve.run(Ingress.bind(Model.bind()))
        while True:
            time.sleep(60)


if __name__ == "__main__":
    serve_on_ray(int(sys.argv[2]))
