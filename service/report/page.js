"use strict";
// Figures are drawn by plotly.js, which is packed into the page; their colors are the page's own, light or dark.
const ground = () => {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), edge = style.getPropertyValue("--edge").trim();
  const raised = style.getPropertyValue("--raised").trim();
  return { ink, edge, raised };
};

function laidOut(layout, width) {
  const { ink, edge, raised } = ground();
  const axis = (own) => ({ automargin: true, gridcolor: edge, linecolor: edge, zerolinecolor: edge, tickcolor: edge, ...own });
  return {
    ...layout,
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    font: { family: getComputedStyle(document.body).fontFamily, size: width < 480 ? 12 : 13, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 10, r: 12, t: 8, b: 10 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", font: { color: ink }, ...layout.legend },
    hoverlabel: { bgcolor: raised, bordercolor: edge, font: { color: ink }, align: "left" },
    dragmode: width < 480 ? false : "zoom", hovermode: "closest",
  };
}

function draw(figures) {
  for (const { id, traces, layout } of figures) {
    const element = document.getElementById(id), width = element.clientWidth, height = element.clientHeight;
    const fixed = document.documentElement.classList.contains("print") ? { width, height } : {};
    Plotly.react(element, traces, { ...laidOut(layout, width), ...fixed }, { responsive: true, displayModeBar: false });
  }
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const nonce = document.currentScript.nonce;  // allows the unpacked code to run

// Printing and screenshots start at the load event, which browsers delay while an image is being decoded.
let isDrawn = false;
function holdLoadEvent() {
  const image = new Image();
  image.onload = () => isDrawn || holdLoadEvent();
  image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=";
}

async function figures() {
  const library = document.getElementById("library");
  if (!library) return;
  const figures = JSON.parse(await unpack(document.getElementById("figures").textContent));
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = await unpack(library.textContent);
  document.head.append(script);
  draw(figures);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(figures));
  for (const event of ["beforeprint", "afterprint"]) {  // on paper: page width and light colors
    addEventListener(event, () => { document.documentElement.classList.toggle("print", event === "beforeprint"); draw(figures); });
  }
}

function sortable(table) {
  const number = (text) => { const value = parseFloat(text.replace(/[,*%]/g, "")); return Number.isNaN(value) ? null : value; };
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const sort = (column) => {
    const up = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = [...body.rows].map((row) => ({ row, text: row.cells[column].textContent, value: number(row.cells[column].textContent) }));
    keyed.sort((a, b) => {
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null) || a.text.localeCompare(b.text) * (up ? 1 : -1);
      return (a.value - b.value) * (up ? 1 : -1);
    });
    body.append(...keyed.map((one) => one.row));
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(column); } });
  });
}

// Scroll a table that is larger than its frame to its best row or cell.
function showBest(frame) {
  const best = frame.querySelector("tr.best, td.best");
  if (!best) return;
  frame.scrollTop = best.offsetTop + (best.offsetHeight - frame.clientHeight) / 2;
  if (best.tagName === "TD") frame.scrollLeft = best.offsetLeft + (best.offsetWidth - frame.clientWidth) / 2;
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".scroll").forEach(showBest);
document.querySelectorAll("details").forEach((part) => {
  part.addEventListener("toggle", () => part.open && part.querySelectorAll(".scroll").forEach(showBest));
});
const copy = document.getElementById("copy");
if (copy && navigator.clipboard) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById("command").textContent);
    copy.textContent = "Copied";
  });
}
figures().finally(() => { isDrawn = true; });
holdLoadEvent();
