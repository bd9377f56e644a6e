"""The earlier home of `hetexp.engine.train_function`."""

import warnings

from hetexp.engine import train_function as train_function

warnings.warn(
    "`hetexp.engine.main.train_function` is now `hetexp.engine.train_function`.", FutureWarning, stacklevel=2
)
