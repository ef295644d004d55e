// Asking the API: one function that answers or throws an ApiError that says what the page does next.

/** kind: "away" (no answer; try again), "starting" (no board yet), "refused" (asks for a token), "missing" (not served). */
export class ApiError extends Error {
  constructor(kind, detail) {
    super(detail);
    this.kind = kind;
  }
}

const TIMEOUT_MS = 8000;

async function problem(response) {
  try {
    const body = await response.json();
    return String(body.detail ?? body.title ?? response.status);
  } catch {
    return `answer ${response.status}`;
  }
}

const KINDS = { 401: "refused", 403: "refused", 404: "missing", 422: "missing", 501: "missing", 503: "starting" };

/** The headers of a request with this token, if there is one. */
export function headersOf(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

/** {body, ageS} of GET /v1`path`. */
export const request = (path, token = "") => exchange(path, { headers: headersOf(token) });

/** {body, ageS} of POST /v1`path`; `question`: its JSON body, null for none. */
export const send = (path, question, token = "") =>
  exchange(path, {
    method: "POST",
    headers: { ...headersOf(token), ...(question === null ? {} : { "content-type": "application/json" }) },
    ...(question === null ? {} : { body: JSON.stringify(question) }),
  });

async function exchange(path, options) {
  let response;
  try {
    response = await fetch(`/v1${path}`, { ...options, cache: "no-cache", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new ApiError("away", "no answer");
  }
  if (!response.ok) throw new ApiError(KINDS[response.status] ?? "away", await problem(response));
  try {
    return { body: await response.json(), ageS: Number(response.headers.get("age")) || 0 };
  } catch {
    throw new ApiError("away", "an answer that is no JSON");
  }
}

const KEPT = "fleetcast.token";

/** The token, if one was ever asked for: kept for the tab only. */
export class Token {
  constructor(dialog) {
    this.dialog = dialog;
    try {
      this.value = sessionStorage.getItem(KEPT) ?? "";
    } catch {
      this.value = "";
    }
  }

  /** Ask the operator, once for all requests that were refused; `why` is what the API said. */
  ask(why) {
    if (this.dialog.open) return;
    const input = this.dialog.querySelector("input");
    this.dialog.querySelector(".why").textContent = this.value ? `The token was refused: ${why}.` : "";
    this.dialog.addEventListener("close", () => this.keep(input.value.trim()), { once: true });
    input.value = "";
    this.dialog.showModal();
  }

  keep(value) {
    this.value = value;
    try {
      sessionStorage.setItem(KEPT, value);
    } catch {
      // forbidden storage: the token lives as long as the page
    }
  }
}
