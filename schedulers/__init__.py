"""The languages of other schedulers: translation only, one file a scheduler."""
