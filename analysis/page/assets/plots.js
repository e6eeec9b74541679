// Pictures by Vega-Lite, in the page's colours; all that have forwards below them share one time axis.

const REQUEST_COLOURS = ["#3f7fd6", "#45a35a", "#c99a2e", "#2ba3a3", "#8d6e52", "#7b8794", "#86b6ee", "#8fcf9b", "#d8c07a", "#7fcaca"];
const CLASSES = [
  { name: "record", words: "chain, position or token", colour: "#d92d3a" },
  { name: "KV bytes", words: "KV bytes", colour: "#f07c12" },
  { name: "input", words: "wrong input", colour: "#d6409f" },
  { name: "history", words: "history check", colour: "#8250df" },
];
const CLASS_COLOURS = Object.fromEntries(CLASSES.map((item) => [item.name, item.colour]));
const OTHER_COLOUR = "#9aa3ad";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const AXIS_WIDTH = () => (matchMedia("(max-width: 600px)").matches ? 40 : 54);

function plotConfig() {
  const width = AXIS_WIDTH();
  return {
    background: null,
    aria: false,
    font: "system-ui, sans-serif",
    padding: { left: 2, right: 10, top: 4, bottom: 2 },
    view: { stroke: null },
    axis: {
      domainColor: colour("line"),
      tickColor: colour("line"),
      gridColor: colour("line"),
      gridOpacity: 0.6,
      labelColor: colour("soft"),
      titleColor: colour("soft"),
      titleFontWeight: "normal",
      labelFontSize: 11,
      titleFontSize: 11,
    },
    axisX: { grid: false, format: ",d", tickMinStep: 1, labelFlush: true },
    axisY: { minExtent: width, maxExtent: width, titlePadding: 4, domain: false, ticks: false },
  };
}

// The shared axis; `x0` and `x1` are moved from outside.
const forwardAxis = (title = null, more = {}) => ({
  type: "quantitative",
  scale: { domainMin: { expr: "x0" }, domainMax: { expr: "x1" }, nice: false, zero: false },
  axis: { title, ...more },
});

const windowParams = () => [
  { name: "x0", value: state.from },
  { name: "x1", value: state.to + 1 },
];

const views = new Map();

// Draw a picture in a figure's box, in place of the one before; moves with the window if its spec has x0 and x1.
async function draw(box, spec, { onClick = null, moves = true } = {}) {
  const turn = Symbol();
  box.turn = turn;
  const made = await window.vegaEmbed(
    box,
    { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", autosize: { type: "fit-x", contains: "padding" }, config: plotConfig(), ...spec },
    { actions: false, ast: true, renderer: "svg", defaultStyle: false, tooltip: showTip, hover: false, logLevel: 1 },
  );
  if (box.turn !== turn) {
    made.finalize();
    return null;
  }
  views.get(box)?.finalize();
  views.set(box, { ...made, moves });
  if (onClick) made.view.addEventListener("click", (event, item) => onClick(item?.datum, event));
  return made.view;
}

let isMoving = false;
function moveAll() {
  if (isMoving) return;
  isMoving = true;
  requestAnimationFrame(() => {
    isMoving = false;
    for (const { view, moves } of views.values()) {
      if (moves) view.signal("x0", state.from).signal("x1", state.to + 1).runAsync();
    }
  });
}
on("window", moveAll);

// Tooltips as text, beside the pointer.
function showTip(_, event, item, value) {
  const tip = byId("tip");
  const text = value?.text ?? value;
  if (!text) {
    tip.hidden = true;
    return;
  }
  fill(tip, String(text).split("\n").map((line, i) => el("div", { class: i ? null : "strong" }, line)));
  tip.hidden = false;
  const { clientX, clientY } = event;
  const { offsetWidth, offsetHeight } = tip;
  tip.style.left = `${Math.max(8, Math.min(clientX + 14, innerWidth - offsetWidth - 8))}px`;
  tip.style.top = `${clientY + 18 + offsetHeight > innerHeight ? clientY - offsetHeight - 12 : clientY + 18}px`;
}

// A box for a picture: says what it shows, takes the arrow keys for the shared axis.
function plotBox(label, className = "") {
  return el("div", { class: `plot ${className}`, role: "group", "aria-roledescription": "chart", "aria-label": label, tabindex: 0, onkeydown: moveByKey });
}

function moveByKey(event) {
  const span = state.to - state.from;
  const step = Math.max(1, Math.round(span / 8));
  const act = {
    ArrowLeft: () => showForwards(state.from - step, state.from - step + span),
    ArrowRight: () => showForwards(state.to + step - span, state.to + step),
    "+": () => showForwards(state.from + step, state.to - step),
    "=": () => showForwards(state.from + step, state.to - step),
    "-": () => showForwards(state.from - step, state.to + step),
    "0": () => showForwards(0, lastForward),
  }[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
  say(`forwards ${counted(state.from)} to ${counted(state.to)}`);
}

function legend(items) {
  return el(
    "ul",
    { class: "legend" },
    items.map(({ name, colour: fillColour, mark = "square" }) => {
      const swatch = el("span", { class: `swatch ${mark}`, "aria-hidden": "true" });
      if (fillColour) swatch.style.setProperty("--swatch", fillColour);
      return el("li", {}, swatch, name);
    }),
  );
}
