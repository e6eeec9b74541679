// The SQL behind every number: a button that opens it, with a copy.

function sqlButton(query, label = "SQL") {
  return el("button", { type: "button", class: "sql", "aria-haspopup": "dialog", onclick: () => openSql([query]) }, label);
}

// A number of the page, which opens the query that made it.
function number(item, { unit = "", label = "" } = {}) {
  const text = `${counted(item.v)}${unit}`;
  return el(
    "button",
    {
      type: "button",
      class: "num",
      "aria-haspopup": "dialog",
      "aria-label": `${label ? `${label}: ` : ""}${text}, show its SQL`,
      onclick: () => openSql([item.q], label),
    },
    text,
  );
}

// What steers a terminal, or hides text from its reader: nothing of it leaves the page as it is.
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

// In SQL such characters stand only inside strings, which may be put together from parts.
const plainSql = (text) => text.replace(UNSEEN, (char) => `' || chr(${char.codePointAt(0)}) || '`);

function shellCommand(text) {
  return `kvcanary sql ${shellQuoted(page.report)} ${shellQuoted(text)}`;
}

function shellQuoted(text) {
  if (/^[\w./+-]+$/.test(text)) return text;
  const escaped = (char) => `'$'\\u${char.codePointAt(0).toString(16).padStart(4, "0")}''`;
  return `'${text.replaceAll("'", "'\\''").replace(UNSEEN, escaped)}'`;
}

function openSql(queries, title = "") {
  const dialog = byId("sql");
  const texts = queries.map((query) => plainSql(typeof query === "number" ? page.queries[query] : query));
  fill(
    dialog,
    el(
      "div",
      { class: "dialog-head" },
      el("h2", { id: "sql-title" }, title ? `SQL: ${title}` : "The SQL behind it"),
      el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close"),
    ),
    texts.map((text) => [
      el("pre", { tabindex: 0, "aria-label": "SQL" }, el("code", {}, text)),
      el(
        "p",
        { class: "actions" },
        copyButton("Copy SQL", text),
        copyButton("Copy command", shellCommand(text)),
      ),
    ]),
  );
  dialog.showModal();
}

function copyButton(label, text) {
  const button = el("button", { type: "button", onclick: copy }, label);
  async function copy() {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      done = copyBySelection(text, button.closest("dialog") ?? document.body);
    }
    button.textContent = done ? "Copied" : "Cannot copy here";
    say(button.textContent);
    setTimeout(() => (button.textContent = label), 1600);
  }
  return button;
}

// Where a page from disk has no clipboard.
function copyBySelection(text, parent) {
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  parent.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

byId("sql").addEventListener("click", (event) => {
  if (event.target === byId("sql")) byId("sql").close();
});
