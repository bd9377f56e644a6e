"""The dashboard: what devices and trainings do, over HTTP, and trainings started from a browser. No torch."""
