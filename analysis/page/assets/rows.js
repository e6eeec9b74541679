// Tables: a caption that says what is shown of how many, and the SQL.

function rowsTable(table, { title, total = null, show = {}, hide = [] } = {}) {
  const columns = table.columns.filter((name) => !hide.includes(name));
  const rows = rowsOf(table);
  const isNumber = Object.fromEntries(
    columns.map((name) => [name, rows.some((row) => typeof row[name] === "number")]),
  );
  const caption = el(
    "figcaption",
    {},
    el("span", { class: "table-title" }, title),
    " ",
    total && rows.length < total.v
      ? [`showing ${counted(rows.length)} of `, number(total, { label: title }), " "]
      : [`${rows.length === page.limits.rows ? "the first " : ""}${counted(rows.length)} ${plural(rows.length, "row")} `],
    sqlButton(table.q),
  );
  const body = el(
    "table",
    {
      onclick: (event) => event.target.closest("td.n") && openSql([table.q], title),
    },
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col", class: isNumber[name] ? "n" : null }, name.replaceAll("_", " "))))),
    el(
      "tbody",
      {},
      rows.map((row) =>
        el(
          "tr",
          {},
          columns.map((name) => el("td", { class: isNumber[name] ? "n" : null }, show[name] ? show[name](row[name], row) : cell(row[name]))),
        ),
      ),
    ),
  );
  return el("figure", { class: "table" }, caption, rows.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, body) : el("p", { class: "soft" }, "none"));
}

// Says what a picture leaves out: of [table, limit, what it holds], those that reached their limit.
function cutNote(tables) {
  const full = tables.filter(([table, limit]) => table && table.data[0]?.length >= limit);
  if (!full.length) return null;
  return el("p", { class: "soft cut" }, `Not all is drawn: only the first ${full.map(([, limit, what]) => `${counted(limit)} ${what}`).join(", ")}. The report has all of them.`);
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? counted(value) : String(value);
}
