// Elements from data. Text is only ever set as text: nothing of a report can become markup.

const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  made.append(...present(children));
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...present(children));
}

// Children at whatever depth, without those that a condition left out.
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

const counted = (value) => (typeof value === "number" ? value.toLocaleString("en-US") : String(value ?? "–"));

const plural = (value, one, many = `${one}s`) => (value === 1 ? one : many);

function say(text) {
  byId("said").textContent = text;
}

// A column-wise table of the page's data as row objects.
function rowsOf(table) {
  if (!table || !table.columns.length) return [];
  return table.data[0].map((_, i) => Object.fromEntries(table.columns.map((name, j) => [name, table.data[j][i]])));
}

// A list in which the arrow keys move and choose; one tab stop.
function listbox(label, items, { render, selected, choose, horizontal = false, className = "" }) {
  const options = items.map((item, i) =>
    el("li", { role: "option", "aria-selected": i === selected, tabindex: i === selected ? 0 : -1 }, render(item, i)),
  );
  const pick = (i, focus) => {
    options.forEach((option, j) => {
      option.setAttribute("aria-selected", String(i === j));
      option.tabIndex = i === j ? 0 : -1;
    });
    if (focus) {
      options[i].focus({ preventScroll: true });
      options[i].scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    choose(items[i], i);
  };
  const moves = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
  const box = el(
    "ul",
    {
      role: "listbox",
      "aria-label": label,
      "aria-orientation": horizontal ? "horizontal" : "vertical",
      class: `listbox ${className}`,
      onclick: (event) => {
        const i = options.findIndex((option) => option.contains(event.target));
        if (i >= 0 && !event.target.closest("button")) pick(i, true);
      },
      onkeydown: (event) => {
        const i = options.indexOf(event.target);
        if (i < 0) return;
        const to = { Home: 0, End: options.length - 1, Enter: i, " ": i }[event.key] ?? i + (moves[event.key] ?? NaN);
        if (Number.isNaN(to)) return;
        event.preventDefault();
        if (to >= 0 && to < options.length) pick(to, true);
      },
    },
    options,
  );
  return { box, pick };
}
