// A fleet's page has no time axis to share and nothing to choose; what the other scripts ask for is here.

const page = JSON.parse(byId("report-data").textContent);
const state = { from: 0, to: 1 };
const lastForward = 1;
const watchers = { theme: [] };

function on(what, act) {
  (watchers[what] ??= []).push(act);
}

function tell(what) {
  for (const act of watchers[what] ?? []) act();
}

function showForwards() {}
