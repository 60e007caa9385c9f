// Episodes turn by turn; each sampled token is coloured by one of its numbers. Text is only ever set as text.
const SCALES = {
  logprob: { low: -4, high: 0, name: "logprob", from: "bad", note: "the redder, the less likely" },
  advantage: { name: "advantage", both: true, note: "green above, red below zero" },
  entropy: { low: 0, high: 3, name: "entropy", from: "warm", note: "the stronger, the more open the choice" },
  ratio: { name: "importance ratio", both: true, center: 1, note: "green above, red below one" },
  version: { name: "policy version", hues: true, note: "a colour for each version" },
  reward: { name: "reward", both: true, note: "green above, red below zero" },
  none: { name: "no colour" },
};

export default {
  template: `
    <div>
      <div class="form"><div class="segment" role="group" aria-label="colour of the tokens"><button v-for="m in modes" :key="m.key" :aria-pressed="String(mode === m.key)" :disabled="!!m.why" :title="m.why || m.note" @click="paint(m.key)">{{ m.name }}</button></div>
        <div class="segment" role="group" aria-label="layout"><button :aria-pressed="String(!one)" @click="one = false">side by side</button><button :aria-pressed="String(one)" @click="one = true">one below the other</button></div>
        <label style="flex-direction:row;align-items:center;gap:6px"><input type="checkbox" v-model="seen"> text that the policy read (mask 0)</label></div>
      <div v-for="m in modes.filter((m) => m.why)" :key="m.key" class="dim">{{ m.name }}: {{ m.why }}</div>
      <div class="episodes" :class="{one}" ref="box" style="margin-top:8px" tabindex="0" role="group" aria-label="episodes; arrow keys move from token to token" @click="click" @keydown="key" @pointerover="over">
        <section v-for="(t, i) in episodes" :key="i" class="episode" :aria-label="'episode ' + t.episode">
          <header><b>episode {{ t.episode }}</b> · reward <b>{{ num(t.reward) }}</b> · <span :class="t.success ? 'good' : 'bad'">{{ t.success ? 'solved' : 'not solved' }}</span> · {{ t.end }}{{ t.greedy ? ' · greedy' : '' }}
            <div class="dim">{{ about(t) }}</div></header>
          <div v-for="(p, j) in t.pieces" :key="j" v-show="seen || p.turn" class="piece" :class="{seen: !p.turn}">
            <div class="who" v-if="p.turn">turn {{ p.turn }} · {{ p.server }} · version {{ p.version }} · reward {{ num(p.reward) }} · logprob {{ p.logprob.toFixed(4) }} · {{ p.finish_reason }}<span v-if="!p.valid" class="bad"> · no valid action</span></div>
            <div class="who" v-else>read, tokens {{ p.start }}–{{ p.end - 1 }}</div>
            <div class="body" :data-body="i + '.' + j"></div></div>
        </section></div>
      <div class="detail" aria-live="polite" data-token-detail><template v-if="token"><span v-for="row in token" :key="row[0]">{{ row[0] }} <b>{{ row[1] }}</b></span></template><span v-else class="dim">Point at a token, or press an arrow key, for its numbers.</span></div>
    </div>`,
  props: { episodes: Array, unavailable: Object, start: { type: String, default: "logprob" } },
  data() { return { mode: this.start, one: this.episodes.length === 1, seen: true, token: null }; },
  mounted() { this.fill(); this.theme = () => this.paint(this.mode); window.addEventListener("themechange", this.theme); },
  unmounted() { window.removeEventListener("themechange", this.theme); },
  computed: { modes() { return Object.entries(SCALES).map(([key, s]) => ({ key, ...s, why: (this.unavailable || {})[key] })); } },
  methods: {
    about(t) {
      const named = (values, word) => Object.entries(values || {}).map(([k, v]) => `${word}${k} ${rlearner.number(v)}`);
      return [...named(t.reward_parts, "reward "), ...named(t.notes, "note "), ...named(t.metrics, "")].join(" · ");
    },
    num(v) { return rlearner.number(v); },
    fill() {
      this.spans = [];
      for (const body of this.$refs.box.querySelectorAll("[data-body]")) {
        const [i, j] = body.dataset.body.split(".").map(Number), piece = this.episodes[i].pieces[j], all = document.createDocumentFragment();
        if (!piece.turn) { body.textContent = piece.text; continue; }
        for (const token of piece.tokens) {
          const span = document.createElement("span");
          span.className = token.reward ? "tok rew" : "tok";
          span.textContent = token.text;
          span.dataset.at = this.spans.length;
          this.spans.push([span, token, i]);
          all.append(span);
        }
        body.replaceChildren(all);
      }
      this.paint(this.mode);
    },
    paint(mode) {
      this.mode = mode;
      const s = SCALES[mode], values = this.spans.map(([, t]) => t[mode]), dark = document.documentElement.dataset.theme === "dark";
      const known = values.filter((v) => v !== null && v !== undefined), center = s.center || 0;
      const far = Math.max(1e-9, ...known.map((v) => Math.abs(v - center))), order = s.hues ? [...new Set(known)].sort((a, b) => a - b) : [];
      this.spans.forEach(([span, token], k) => {
        const v = values[k];
        let hue = 0, alpha = 0;
        if (v === null || v === undefined || mode === "none") alpha = 0;
        else if (s.hues) { hue = (order.indexOf(v) * 137 + 210) % 360; alpha = 0.3; }
        else if (s.both) { hue = v >= center ? 140 : 0; alpha = (Math.abs(v - center) / far) * 0.55; }
        else { hue = s.from === "bad" ? 0 : 30; const k2 = (v - s.low) / (s.high - s.low); alpha = Math.min(1, Math.max(0, s.from === "bad" ? 1 - k2 : k2)) * 0.6; }
        span.style.background = alpha > 0.005 ? `hsla(${hue}, 75%, ${dark ? 55 : 50}%, ${alpha.toFixed(3)})` : "";
      });
    },
    tell(k) {
      if (this.last) this.last.classList.remove("at");
      const [span, t, i] = this.spans[k];
      span.classList.add("at"); this.last = span; this.at = k;
      const f = (v, d) => (v === null || v === undefined ? "–" : v.toFixed(d));
      this.token = [["episode", this.episodes[i].episode], ["position", t.position], ["id", t.id], ["text", JSON.stringify(t.text)], ["logprob", f(t.logprob, 4)], ["probability", t.logprob === null ? "–" : Math.exp(t.logprob).toFixed(4)], ["version", t.version], ["mask", t.mask ? 1 : 0]];
      if (t.reward) this.token.push(["reward", this.num(t.reward)]);
      for (const key of ["advantage", "entropy", "ratio"]) if (t[key] !== null && t[key] !== undefined) this.token.push([SCALES[key].name, f(t[key], 4)]);
    },
    over(e) { const at = e.target.dataset?.at; if (at !== undefined) this.tell(+at); },
    click(e) { this.over(e); },
    key(e) {
      const to = { ArrowLeft: (this.at ?? 0) - 1, ArrowRight: (this.at ?? -1) + 1, Home: 0, End: this.spans.length - 1 }[e.key];
      if (to === undefined || !this.spans.length) return;
      e.preventDefault();
      this.tell(Math.min(Math.max(to, 0), this.spans.length - 1));
      this.last.scrollIntoView({ block: "nearest" });
    },
  },
};
