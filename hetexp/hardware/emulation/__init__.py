"""Cards that are not there: their speed, their memory, and faults to inject."""
