from hetexp.balancing.base import BalancingPolicy
from hetexp.hardware.backend import Backend as Backend
from hetexp.library.run import Run as Run
from hetexp.library.setup import setup as setup
from hetexp.logger.base import Logger as Logger
from hetexp.model.hooks import ModelHooks as ModelHooks
from hetexp.plan.strategy import Strategy as Strategy
from hetexp.strategy.local_sgd import LocalSGD as LocalSGD
from hetexp.strategy.synchronous import Synchronous as Synchronous
from hetexp.training.loss import Loss as Loss
from hetexp.training.recovery.rank_commands import on_request as on_request

Policy = BalancingPolicy
__version__: str
