// The page's frame: which view is shown, the state of the connection, the token.

import { api, keepToken, onTokenNeeded, takeTokenOfAddress, token } from "./js/api.js";
import { askForToken } from "./js/dialog.js";
import { h, place, say } from "./js/dom.js";
import { clock } from "./js/format.js";
import { live } from "./js/live.js";
import { newView } from "./js/new.js";
import { systemView } from "./js/system.js";
import { trainingView } from "./js/training.js";
import { trainingsView } from "./js/trainings.js";

const main = document.getElementById("content");
const go = (hash) => { location.hash = hash; };
let view = null;

/** Return the view of an address. */
function viewOf(hash) {
  const [, name, id] = /^#\/(\w*)(?:\/(.+))?$/.exec(hash) ?? [null, "", null];
  if (name === "new") return ["#/new", newView({ go })];
  if (name === "trainings" && id) return ["#/trainings", trainingView({ go, id: decodeURIComponent(id) })];
  if (name === "trainings") return ["#/trainings", trainingsView()];
  return ["#/system", systemView()];
}

function show() {
  const first = view === null;
  view?.close();
  document.getElementById("tip").hidden = true;
  const [tab, next] = viewOf(location.hash);
  view = next;
  place(main, view.node);
  document.title = `${view.title} – hetexp`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (first) return;
  scrollTo(0, 0);
  const heading = main.querySelector("h1");
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
}

const WORDS = { connecting: "connecting", live: "live", polling: "every 3 s", lost: "connection lost" };

function connection(state) {
  if (token() && (state === "live" || state === "polling")) api.session().catch(() => {}); // for links to reports
  const pill = document.getElementById("connection");
  pill.dataset.state = state;
  say(pill, WORDS[state]);
  const lost = document.getElementById("lost");
  lost.hidden = state !== "lost";
  const since = live.heard ? ` What is shown is of ${clock(live.heard)}.` : "";
  if (state === "lost") place(lost, `Connection lost, trying again …${since} Trainings go on.`, " ",
    h("button", { type: "button", class: "plain-button", onclick: () => live.retry() }, "Try now"));
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is the view's
  main.focus();
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("hetexp-theme", root.dataset.theme); } catch (error) { /* this page only */ }
});

onTokenNeeded(async (wrong) => {
  const given = await askForToken(wrong);
  keepToken(given);
  if (given) setTimeout(() => live.retry(), 0);
  return given;
});
takeTokenOfAddress();
live.on("state", connection);
addEventListener("hashchange", show);
show();
live.start();
