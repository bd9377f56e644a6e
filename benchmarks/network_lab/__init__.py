"""Machines of their own on one machine: network namespaces whose links are as slow as one wants."""
