// Theme and keyboard shortcuts; runs before the page is drawn.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("rlearner-theme");
  const colors = new Map(); // asking for a computed style again and again would lay the page out each time
  const apply = () => {
    colors.clear();
    root.dataset.theme = chosen() || (dark.matches ? "dark" : "light");
    window.dispatchEvent(new Event("themechange"));
  };
  apply();
  dark.addEventListener("change", apply);

  window.rlearner = {
    toggleTheme() {
      localStorage.setItem("rlearner-theme", root.dataset.theme === "dark" ? "light" : "dark");
      apply();
    },
    help() {
      const dialog = document.getElementById("shortcuts");
      if (dialog) dialog.open ? dialog.close() : dialog.showModal();
    },
    color(name) {
      if (!colors.get(name)) colors.set(name, getComputedStyle(root).getPropertyValue(name).trim());
      return colors.get(name);
    },
    number(value) {
      if (value === null || value === undefined || Number.isNaN(value)) return "–";
      const size = Math.abs(value);
      if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
      if (Number.isInteger(value)) return value.toLocaleString("en-US");
      return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : value.toFixed(size >= 1 ? 2 : 4);
    },
    tick(value) {
      const size = Math.abs(value);
      return size >= 1e6 || (size > 0 && size < 1e-4) ? value.toExponential(1) : value.toLocaleString("en-US", { maximumFractionDigits: 5 });
    },
    tellCharts(kind, what) {
      window.dispatchEvent(new CustomEvent("charts", { detail: { kind, what } }));
    },
    clock(seconds) {
      return new Date(seconds * 1000).toLocaleTimeString("en-GB");
    },
  };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") window.rlearner.help();
    else if (event.key === "t") window.rlearner.toggleTheme();
    else if (event.key === "/") {
      const search = document.querySelector("[data-search] input, input[data-search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    } else if (/^[0-9]$/.test(event.key)) {
      const link = document.querySelector(`[data-key="${event.key}"]`);
      if (link) link.click();
    }
  });
  document.addEventListener("click", (event) => {
    const act = event.target.closest("[data-do]")?.dataset.do;
    if (act === "theme") window.rlearner.toggleTheme();
    if (act === "help") window.rlearner.help();
    const asks = event.target.closest("[data-confirm]");
    if (asks && !asks.disabled && confirm(asks.dataset.confirm)) asks.dispatchEvent(new CustomEvent("confirmed"));
  });
})();
