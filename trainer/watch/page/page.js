"use strict";
// A chart's data is the CSV in its download link: values under the pointer come from there, and parts
// that are stacked are stacked again when one of them is hidden.
const toggle = (button) => {
  const on = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(on));
  return on;
};
for (const button of document.querySelectorAll(".runs button")) {
  button.addEventListener("click", () => toggle(button));
}

for (const chart of document.querySelectorAll(".chart[data-range]")) {
  const area = chart.querySelector(".area");
  const cursor = chart.querySelector(".cursor");
  const [xLow, xHigh, yLow, yHigh] = chart.dataset.range.split(" ").map(Number);
  const stacked = chart.dataset.stacked === "1";
  const shapes = [...chart.querySelectorAll("[d][data-series]")];
  const hidden = new Set();
  let table = null;

  const rows = () => {
    if (table === null) {
      const text = decodeURIComponent(chart.querySelector(".csv").href.split(",").slice(1).join(","));
      table = text.trim().split("\n").slice(1).map(
        (line) => line.split(",").map((cell) => (cell === "" ? null : Number(cell))));
    }
    return table;
  };
  const shape = (series) => shapes.find((one) => one.dataset.series === String(series));
  const x = (value) => ((value - xLow) / (xHigh - xLow)) * 1000;
  const y = (value) => ((yHigh - value) / (yHigh - yLow)) * 1000;

  const restack = () => {
    const sums = rows().map(() => 0);
    for (let series = 0; series < shapes.length; series++) {
      if (hidden.has(series)) continue;
      const top = rows().map((row, n) => "V" + y((sums[n] += row[series + 1] ?? 0)).toFixed(1) + "H" + x(row[0]).toFixed(1));
      shape(series).setAttribute("d", "M0 1000" + top.join("") + "V1000Z");
    }
  };

  const reveal = (series, on) => {
    if (on) hidden.delete(series);
    else hidden.add(series);
    shape(series).style.display = on ? "" : "none";
    if (stacked) restack();
  };
  for (const button of chart.querySelectorAll("button")) {
    button.addEventListener("click", () => reveal(Number(button.dataset.series), toggle(button)));
  }
  for (const button of document.querySelectorAll(".runs button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") === "true"; // toggled above
      for (const one of shapes) {
        if (one.dataset.run === button.dataset.run) reveal(Number(one.dataset.series), on);
      }
    });
  }

  const written = (value) => {
    const form = chart.dataset.form;
    if (value === 0) return "0";
    if (form === "share") return (100 * value).toPrecision(4) + " %";
    if (form === "seconds") return value < 1 ? (1000 * value).toPrecision(4) + " ms" : value.toPrecision(4) + " s";
    const text = Math.abs(value) >= 1e5 || Number.isInteger(value)
      ? Math.round(value).toLocaleString("en")
      : String(Number(value.toPrecision(5)));
    return form === "GiB" ? text + " GiB" : text;
  };

  const tip = document.createElement("div");
  tip.className = "tip";
  chart.append(tip);

  const line = (name, value, color) => {
    const row = document.createElement("span");
    const key = document.createElement("i");
    const label = document.createElement("em");
    if (color) key.className = color;
    else key.style.visibility = "hidden";
    label.textContent = name;
    row.append(key, label, document.createTextNode(written(value)));
    return row;
  };

  const show = (event) => {
    const box = area.getBoundingClientRect();
    const at = xLow + ((event.clientX - box.left) / box.width) * (xHigh - xLow);
    // Parts of a stack reach back to the row before; on a line, the nearest point counts.
    const near = stacked
      ? (a, b) => (a[0] >= at ? a : b)
      : (a, b) => (Math.abs(a[0] - at) <= Math.abs(b[0] - at) ? a : b);
    const first = rows().reduce(near);
    const head = document.createElement("b");
    head.textContent = chart.dataset.x + " " + first[0].toLocaleString("en");
    tip.replaceChildren(head);
    let total = 0;
    for (const one of shapes.slice().sort((a, b) => a.dataset.series - b.dataset.series)) {
      const series = Number(one.dataset.series);
      const known = rows().filter((row) => row[series + 1] !== null);
      if (hidden.has(series) || known.length === 0) continue;
      const value = known.reduce(near)[series + 1];
      total += value;
      const color = one.classList[one.classList.length - 1];
      tip.append(line(shapes.length > 1 ? one.dataset.name : "", value, color));
    }
    if (stacked && shapes.length > 1) tip.append(line("all", total, null));
    const left = ((first[0] - xLow) / (xHigh - xLow)) * box.width;
    cursor.style.display = tip.style.display = "block";
    cursor.style.left = left + "px";
    const base = area.offsetLeft + left;
    const right = base + 14 + tip.offsetWidth > chart.clientWidth;
    tip.style.left = Math.max(8, right ? base - 14 - tip.offsetWidth : base + 14) + "px";
    tip.style.top = area.offsetTop + area.offsetHeight + 26 + "px"; // not over what it is about
  };
  const hide = () => { cursor.style.display = tip.style.display = "none"; };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", hide);
}
