// What is chosen, and who wants to know: one state, and one time axis for every picture.

const page = JSON.parse(byId("report-data").textContent);

const state = { subject: 0, slot: null, request: null, chain: 0, from: 0, to: 1 };
const watchers = { subject: [], slot: [], request: [], chain: [], window: [], theme: [] };

function on(what, act) {
  watchers[what].push(act);
}

function tell(what) {
  for (const act of watchers[what]) act();
}

function choose(what, value) {
  if (state[what] === value) return;
  state[what] = value;
  tell(what);
}

const subject = () => page.subjects.shown[state.subject];
const lastForward = Math.max(1, page.timeline.last);

// Forwards `from` up to and including `to`.
function showForwards(from, to, by = "") {
  let a = Math.max(0, Math.min(lastForward, Math.round(from)));
  let b = Math.max(0, Math.min(lastForward, Math.round(to)));
  if (b < a) [a, b] = [b, a];
  if (b - a < 4) {
    a = Math.max(0, a - 2);
    b = Math.min(lastForward, a + 4);
  }
  if (a === state.from && b === state.to) return;
  state.from = a;
  state.to = b;
  state.windowBy = by;
  tell("window");
}

function showAround(item) {
  const margin = Math.max(6, Math.round((item.last - item.first) * 0.35));
  showForwards(item.first - margin, item.last + margin);
}

const slotKey = (group, slot) => `${group}:${slot}`;

function slotName(key) {
  const [group, slot] = key.split(":");
  return page.groups.length > 1 ? `${slot} · ${page.groups[group]?.name ?? `group ${group}`}` : slot;
}

const WHO_NOBODY = "nobody";
const WHO_CACHE = "prefix cache";
const requestName = (row) => row.request || (row.request_id === null ? WHO_NOBODY : `#${row.request_id}`);

// Long names (ids of 32 digits) keep both ends.
const short = (name, most = 16) => (name.length <= most ? name : `${name.slice(0, most - 6)}…${name.slice(-5)}`);

// report.html#incident=2&slot=0:344 opens on that incident, and on that slot of pool group 0; the address follows the choice.
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const { shown } = page.subjects;
  const slot = asked.get("slot")?.replace(/^(?!.*:)/, "0:");
  const holds = (item) => item.map.slots.data[0]?.some((group, i) => slotKey(group, item.map.slots.data[1][i]) === slot);
  const isMeant = asked.has("incident") ? (item) => String(item.number) === asked.get("incident") : holds;
  const found = shown.findIndex(isMeant);
  if (found < 0) return;
  state.subject = found;
  state.wanted = slot && holds(shown[found]) ? slot : null;
}

function writeAddress() {
  const { number } = subject() ?? {};
  if (number) history.replaceState(null, "", `#incident=${number}${state.slot ? `&slot=${state.slot}` : ""}`);
}
