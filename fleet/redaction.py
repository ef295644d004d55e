"""The removal of secrets from texts: users in URLs, and the values of URL queries."""

import re

_USER = re.compile(r"(://)[^/\s@]*@")
_CREDENTIALS = re.compile(r"\b(bearer|basic) +[\w.~+/=-]{8,}", re.IGNORECASE)
_QUERY = re.compile(r"(://[^\s?'\"<>]{0,2000}|(?<=\S))\?([^\s'\"<>]+)")  # of a URL, or of a path and then with a '='
_VALUE = re.compile(r"(?:^|(?<=[&;]))([^&;=]*=|)[^&;]*")
_TAIL = ".,:;)]}"  # of the sentence that quotes a URL


def redact_secrets(text: str) -> str:
    """Remove the passwords and tokens of URLs and headers from `text`.

    >>> redact_secrets("http://me:secret@host/x?token=secret&module=gpu is away")
    'http://***@host/x?token=***&module=*** is away'
    """
    return _QUERY.sub(_mask_query, _CREDENTIALS.sub(r"\1 ***", _USER.sub(r"\1***@", text)))


def _mask_query(found: re.Match[str]) -> str:
    if not found[1] and "=" not in found[2]:
        return found[0]
    query = found[2].rstrip(_TAIL)
    shown = _VALUE.sub(r"\1***", query)
    return f"{found[1]}?{shown}{found[2][len(query) :]}"
