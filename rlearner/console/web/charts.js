// How charts are shown: smoothing, axis, order, hidden charts and lines; kept in this browser. Runs before the page is drawn.
(() => {
  const KEPT = "rlearner-charts";
  const FIRST = { smoothing: 0.1, axis: "step", order: [], hidden: [], wide: [], lines: {} };
  const MAX_CHARTS = 100;
  const read = () => {
    try { return JSON.parse(localStorage.getItem(KEPT)); } catch { return null; }
  };
  const texts = (all) => (Array.isArray(all) ? all.filter((text) => typeof text === "string").slice(0, MAX_CHARTS) : []);
  const valid = (kept) => {
    const { smoothing, axis, lines } = kept && typeof kept === "object" ? kept : {};
    return {
      smoothing: smoothing >= 0 && smoothing <= 1 ? Number(smoothing) : FIRST.smoothing,
      axis: axis === "time" ? "time" : "step",
      order: texts(kept?.order), hidden: texts(kept?.hidden), wide: texts(kept?.wide),
      lines: Object.fromEntries(Object.entries(lines || {}).filter(([, shown]) => typeof shown === "boolean").slice(0, MAX_CHARTS)),
    };
  };
  const charts = {
    view: valid(read()),
    clock: { x: [], y: [] }, // steps, and seconds since 1970 at which their lines were written
    is_kept: read() !== null,
    // Changes the view and keeps it; the parts of the page that show it hear of it.
    change(news) {
      charts.view = valid({ ...charts.view, ...news });
      charts.is_kept = true;
      localStorage.setItem(KEPT, JSON.stringify(charts.view));
      charts.announce();
    },
    begin(kept) { // what the console kept of another address, for a browser that has nothing of its own
      if (!charts.is_kept && kept) { charts.view = valid(kept); charts.announce(); }
    },
    reset() { charts.change(FIRST); },
    announce() { window.dispatchEvent(new Event("chartview")); },
    // The arranged charts of the page as they are seen: {title, panel}.
    seen() {
      const panels = [...document.querySelectorAll("[data-chart]")].map((el) => ({ title: el.dataset.chart, panel: el.parentElement }));
      return panels.sort((a, b) => (a.panel.style.order || 0) - (b.panel.style.order || 0));
    },
    // Moves a chart before another one, or by some places among the charts that are not hidden.
    move(title, to) {
      const titles = charts.seen().map((chart) => chart.title);
      const visible = titles.filter((name) => !charts.view.hidden.includes(name));
      const target = typeof to === "number" ? visible[visible.indexOf(title) + to] : to;
      if (target === undefined || target === title) return;
      const is_later = typeof to === "number" ? to > 0 : titles.indexOf(target) > titles.indexOf(title);
      const others = titles.filter((name) => name !== title);
      others.splice(others.indexOf(target) + (is_later ? 1 : 0), 0, title);
      const elsewhere = charts.view.order.filter((name) => !others.includes(name));
      charts.change({ order: [...others, ...elsewhere] });
    },
    toggle(name, title) { // a title in `hidden` or `wide`
      const all = charts.view[name];
      charts.change({ [name]: all.includes(title) ? all.filter((text) => text !== title) : [...all, title] });
    },
    arrange(panel, title) {
      const place = charts.view.order.indexOf(title);
      panel.style.order = place < 0 ? "" : place + 1;
      panel.style.display = charts.view.hidden.includes(title) ? "none" : "";
      panel.classList.toggle("wide", charts.view.wide.includes(title));
    },
    tick(steps, times) { // new points of the clock
      const { x, y } = charts.clock;
      steps.forEach((step, i) => { if (!x.length || step > x[x.length - 1]) { x.push(step); y.push(times[i]); } });
    },
    // Times of ascending steps, between those of the clock.
    times(steps) {
      const { x, y } = charts.clock, last = x.length - 1;
      let k = 0;
      return steps.map((step) => {
        while (k < last - 1 && x[k + 1] < step) k++;
        if (last < 0) return step;
        if (step <= x[0] || last === 0) return y[0];
        if (step >= x[last]) return y[last];
        if (x[k] > step) k = 0;
        return y[k] + ((step - x[k]) / (x[k + 1] - x[k])) * (y[k + 1] - y[k]);
      });
    },
    // The mean around each point, over a share of the curve and fewer at its ends. `means`: of the steps that each point stands for.
    smooth(x, means, share) {
      const count = x.length;
      if (count < 3 || !share) return means;
      const spacing = (x[count - 1] - x[0]) / (count - 1), reach = spacing * count * share / 2 + 1e-9, sums = [0];
      if (reach < spacing) return means;
      for (const value of means) sums.push(sums[sums.length - 1] + value);
      let first = 0, end = 0;
      return x.map((step) => {
        while (x[first] < step - reach) first++;
        while (end < count && x[end] <= step + reach) end++;
        return (sums[end] - sums[first]) / (end - first);
      });
    },
  };
  window.rlearner.charts = charts;
})();
