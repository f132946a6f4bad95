"""Configurations that exist to be dominated by one part of memory."""
