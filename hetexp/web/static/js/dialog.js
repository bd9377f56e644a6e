// Questions that need an answer before anything goes on.

import { h, newId } from "./dom.js";

/** Show a dialog and resolve to what `form` returned, or null where it was cancelled. */
function ask(title, content, { yes, danger = false, answer = () => true, focus = null }) {
  const name = newId("dialog");
  const form = h("form", { method: "dialog" },
    h("h2", { id: name }, title), content,
    h("div", { class: "actions" },
      h("button", { type: "button", class: "plain-button", onclick: () => dialog.close("") }, "Cancel"),
      h("button", { type: "submit", class: danger ? "button danger" : "button", value: "yes" }, yes)));
  const dialog = h("dialog", { "aria-labelledby": name }, form);
  const before = document.activeElement;
  document.body.append(dialog);
  dialog.showModal();
  (focus ?? form.querySelector(".actions button")).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "yes" ? answer() : null;
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(given);
    });
  });
}

/** Ask whether to go on; resolves to true, or to null. */
export const confirm = (title, text, yes) => ask(title, h("p", {}, text), { yes, danger: true });

/** Ask for the server's token; `wrong` where one was refused. */
export function askForToken(wrong) {
  const input = h("input", { id: newId("token"), type: "password", required: true, autocomplete: "off", spellcheck: "false",
    "aria-describedby": wrong ? "token-wrong" : null, "aria-invalid": wrong ? "true" : null });
  const content = h("div", { class: "field" },
    h("p", {}, "This server asks for a token. It was printed where ", h("code", {}, "hetexp dashboard"), " was started, and is kept until this tab is closed."),
    h("label", { for: input.id }, "Token"), input,
    wrong && h("p", { class: "field-error", id: "token-wrong" }, "The server refused this token."));
  return ask("Token needed", content, { yes: "Go on", answer: () => input.value.trim() || null, focus: input });
}
