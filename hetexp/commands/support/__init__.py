"""Parsers, tables, checks and certificates that the commands share."""
