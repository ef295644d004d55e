"""Elastic gangs: which members a gang gives up for a request, and when it grows back."""
