// Requests to this server, and the token where it asks for one.

const BASE = "api/v1";
const KEY = "hetexp-token";
let askForToken = async () => null;
let asking = null;
let kept = null; // where the browser stores nothing

/** What the server refused or could not be asked. `status` is 0 where there was no answer. */
export class ApiError extends Error {
  constructor(status, message, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

export function token() {
  try { return sessionStorage.getItem(KEY); } catch (error) { return kept; }
}

/** Keep the token as long as this tab is open; null forgets it. */
export function keepToken(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch (error) { /* no storage: kept here */ }
}

/** Take a token that came with the link (`#token=…`, which is never sent) out of the address. */
export function takeTokenOfAddress() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (!found) return;
  keepToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

/** Let `ask(wrong)` bring a token; it resolves to null where the person gives none. */
export function onTokenNeeded(ask) { askForToken = ask; }

async function newToken(used) {
  if (token() !== used) return token(); // another request has asked meanwhile
  asking ??= askForToken(used !== null).finally(() => { asking = null; });
  const given = await asking;
  if (given) keepToken(given);
  return given;
}

/** Send a request and return the response, whatever its status but 401. */
async function send(method, path, body) {
  for (;;) {
    const used = token();
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (method === "POST") headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      throw new ApiError(0, "The server does not answer.");
    }
    if (response.status !== 401) return response;
    if (!await newToken(used)) throw new ApiError(401, "The server asks for a token.");
  }
}

/**
 * Ask the server for JSON.
 *
 * @returns the answer; null where it has none
 * @throws ApiError with `problems` [{key, message}] where values were refused
 */
async function request(method, path, body) {
  const response = await send(method, `${BASE}/${path}`, body);
  const text = await response.text();
  let answer = null;
  try { answer = text ? JSON.parse(text) : null; } catch (error) { /* a proxy's page: told by its status */ }
  if (response.ok) return answer;
  const problems = problemsOf(answer);
  const told = typeof answer?.detail === "string" ? answer.detail : problems.map((one) => one.message).join(" ");
  throw new ApiError(response.status, told || `The server answered ${response.status}.`, problems);
}

/** What was refused, as [{key or null, message}]. */
function problemsOf(answer) {
  return Array.isArray(answer?.detail) ? answer.detail.map(({ key = null, message }) => ({ key, message })) : [];
}

const query = (values) => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== null && v !== "")).toString();
const training = (id) => `trainings/${encodeURIComponent(id)}`;

export const api = {
  devices: async () => (await request("GET", "system/gpus")).devices,
  history: async (view, since, points) => (await request("GET", `system/metrics?${query({ view, since, points })}`)).series,
  options: () => request("GET", "options"),
  estimate: (wish) => request("POST", "estimate", wish),
  start: (wish) => request("POST", "trainings", wish),
  trainings: async (values) => (await request("GET", `trainings?${query(values)}`)).trainings,
  training: (id) => request("GET", training(id)),
  metrics: async (id, since) => (await request("GET", `${training(id)}/metrics?${query({ since_step: since })}`)).rows,
  stop: (id) => request("POST", `${training(id)}/stop`),
  remove: (id) => request("DELETE", training(id)),
  /** Let the browser open reports by itself: it can send no token with a link. */
  session: () => request("POST", "session"),
};
