"""Makes this folder, which the wheel has as hetexp/conf, known to other Hydra applications: pkg://hetexp.conf."""
