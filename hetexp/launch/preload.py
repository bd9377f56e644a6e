"""Imported once by the fork server, so that a forked rank imports nothing slow again."""

import hydra.utils  # noqa: F401
import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torch._dynamo  # every optimizer imports it, for 1.2 s
import torch.distributed
import torch.distributed.pipelining
import torch.nn.parallel
import torch.utils.flop_counter  # noqa: F401
