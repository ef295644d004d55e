"""The check that a board is fresh enough for decisions."""


def describe_staleness(age_s: float, limit_s: float) -> str:
    """Explain why a board is too old, or too far ahead of the clock. Returns "" if it is fresh.

    age_s: the age of the board. limit_s: the highest age of a fresh board. Both are in fleet seconds.

    >>> describe_staleness(59.0, 60.0), describe_staleness(-59.0, 60.0)
    ('', '')
    >>> describe_staleness(61.0, 60.0)
    'the board is 61 s old, at most 60 s are fresh: the pipeline is down or slow'
    """
    if age_s > limit_s:
        return f"the board is {age_s:.0f} s old, at most {limit_s:.0f} s are fresh: the pipeline is down or slow"
    if age_s < -limit_s:
        return (
            f"the board is {-age_s:.0f} s ahead of the clock: the clock was set back, or it is another clock's; "
            "the pipeline's next board mends it"
        )
    return ""
