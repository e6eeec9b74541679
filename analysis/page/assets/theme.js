// Light or dark, as the system has it or as chosen.

const THEMES = ["auto", "light", "dark"];
let theme = "auto";

function setTheme(name) {
  theme = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  const button = byId("theme");
  button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[name];
  button.setAttribute("aria-label", `Colours: ${name}; change`);
}

byId("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  tell("theme");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme === "auto" && tell("theme"));
