"""The other sides of `benchmarks/serve.py`: the same DLRM with the same weights in other services.

    python benchmarks/serve_sides.py ray PORT        Ray Serve, as Ray's makers published it
    uvicorn serve_sides:app                          FastAPI and torch, one process: /pydantic, /orjson, /stacked

WEIGHTS is a file written by `serve_http.write_weights`. All services take the body that their authors would
choose for this model, {"dense": [[13 numbers] …], "sparse": [[26 ids] …]}, and return {"score": […]}.
"""

import os
import sys
import time
from functools import cache
from itertools import pairwise

import numpy as np
import orjson
import torch
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from torch import nn


class Dlrm(nn.Module):
    """DLRM of Ray's benchmark, with an EmbeddingBag per feature, or one table with all rows (`is_stacked`)."""

    def __init__(self, is_stacked: bool = False):
        super().__init__()
        stored = torch.load(os.environ["WEIGHTS"], weights_only=True)
        features, table_rows, dim = stored["tables"].shape
        self.is_stacked, self.table = is_stacked, stored["tables"].flatten(0, 1)
        self.starts = torch.arange(features) * table_rows
        bags = () if is_stacked else stored["tables"]
        self.tables = nn.ModuleList(nn.EmbeddingBag.from_pretrained(each, mode="sum") for each in bags)
        self.bottom = _mlp([stored["dense"][0].shape[1], 256, dim])
        n = 1 + features
        self.top = _mlp([dim + n * (n - 1) // 2, 256, 128, 64]).append(nn.Linear(64, 1))
        rows, columns = torch.triu_indices(n, n, 1)
        self.register_buffer("pairs", rows * n + columns)
        for parameter, value in zip([*self.bottom.parameters(), *self.top.parameters()], stored["dense"], strict=True):
            parameter.data = value
        self.eval()

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return the score of each row, float32 [B]."""
        x = self.bottom(dense)
        if self.is_stacked:
            looked_up = self.table.index_select(0, (sparse + self.starts).flatten())
            vectors = torch.cat([x.unsqueeze(1), looked_up.view(*sparse.shape, -1)], 1)
        else:
            looked_up = [table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables)]
            vectors = torch.stack([x, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return torch.sigmoid(self.top(torch.cat([x, products], 1))).squeeze(1)


def _mlp(sizes: list[int]) -> nn.Sequential:
    return nn.Sequential(*(each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())))


class Body(BaseModel):
    """Request body with rows as lists."""

    dense: list[list[float]]
    sparse: list[list[int]]


app = FastAPI()


@cache
def _load_model(is_stacked: bool) -> Dlrm:
    torch.set_num_threads(1)
    return Dlrm(is_stacked)


@app.post("/pydantic")
async def predict_pydantic(body: Body) -> dict[str, list[float]]:
    """Return the scores of a request's rows, parsed and serialized by pydantic."""
    with torch.inference_mode():
        return {"score": _load_model(False)(torch.tensor(body.dense), torch.tensor(body.sparse)).tolist()}


@app.post("/orjson")
@app.post("/stacked")
async def predict_orjson(request: Request) -> Response:
    """Return the scores of a request's rows, parsed and serialized by orjson."""
    body, model = orjson.loads(await request.body()), _load_model(request.scope["path"] == "/stacked")
    dense, sparse = np.array(body["dense"], np.float32), np.array(body["sparse"], np.int64)
    with torch.inference_mode():
        scores = model(torch.from_numpy(dense), torch.from_numpy(sparse)).numpy()
    return Response(orjson.dumps({"score": scores}, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def serve_on_ray(port: int) -> None:
    """Serve an ingress and a model that waits up to 50 ms for a batch of 100 requests."""
    from ray import serve

    from raytrec.cluster.session import ray_session

    @serve.deployment(ray_actor_options={"num_cpus": 0.5}, max_ongoing_requests=400)
    class Model:
        def __init__(self):
            torch.set_num_threads(1)
            self.model = Dlrm()

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
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(Ingress.bind(Model.bind()))
        while True:
            time.sleep(60)


if __name__ == "__main__":
    serve_on_ray(int(sys.argv[2]))
