// The sections of the page, each drawn from its part of the data.

const KINDS = {
  kept: "reused where it was", rotated: "reused at a new position", fresh: "prefilled in this turn", evicted: "taken out in this turn",
};

function section(id, title, ...content) {
  return make("section", { id, "aria-label": title }, make("h2", {}, title), ...content);
}

function measuredOn(result) {
  const machine = result.machine || {}, server = result.server || result, versions = { ...(machine.versions || {}), ...(machine.server_versions || {}) };
  const parts = [server.model, server.context_length && `context ${number(server.context_length)}`, server.kv_dtype && `KV ${server.kv_dtype}`,
    machine.cpu && `${machine.cores} cores, ${machine.cpu}`, machine.load_average && `load ${machine.load_average[0]}`,
    versions.sglang && `SGLang ${versions.sglang}`, versions.torch && `torch ${versions.torch}`,
    (machine.measured_at || "").slice(0, 10), result.source];
  return make("p", { class: "soft" }, parts.filter(Boolean).join(" · "));
}

function replaySection(result, index) {
  const arms = Object.keys(result.arms), id = `replay-${index}`;
  const ms = (times, name) => (times ? number(times[name]) : "–");
  const rows = arms.map((arm, i) => {
    const f = result.arms[arm];
    return [make("span", {}, swatch(i), arm), number(f.requests), number(f.prompt_tokens), number(f.cached_tokens), number(f.rotated_tokens),
      number(f.prefilled_tokens), number(f.replacement_tokens), percent(f.hit_rate), number(f.reprefill_avoided_tokens),
      ms(f.ttft_ms, "p50"), ms(f.ttft_ms, "p95"), ms(f.ttft_edited_turns_ms, "p50")];
  });
  const checks = result.checks.map((check) => make("li", { class: check.holds ? "good" : "bad" },
    `${check.holds ? "✓" : "✗"} ${check.arm}: ${check.name} (${number(check.found)} against ${number(check.bound)})`));
  const failed = result.failed.map((one) => make("li", { class: "bad" }, `✗ ${one.arm}, ${one.task}: ${one.error}`));
  const tasks = result.tasks.map((one) => one.task);
  return section(id, "Replay: what every arm costs",
    make("p", {}, `Recorded trajectories of ${tasks.length} tasks, every request served, the same tool outputs in every arm. Tokens are exact, times are this machine's. “Avoided” is what re-prefilling the same edits would have computed on top; times are to the first token, “edited” in turns with an edit only.`),
    measuredOn(result),
    table(["arm", "requests", "prompt", "cached", "rotated", "prefilled", "for stubs", "hit rate", "avoided",
      "p50 ms", "p95 ms", "edited p50"], rows),
    make("ul", { class: "checks" }, checks, failed),
    tasks.length ? stepper(result, arms, id) : null);
}

function stepper(result, arms, id) {
  const holder = make("div", { class: "stepper" });
  const state = { task: result.tasks[0].task, turn: 0, playing: null };
  const runs = () => arms.map((arm) => result.runs.find((run) => run.arm === arm && run.task === state.task));
  const last = () => Math.max(...runs().map((run) => run.turns.length)) - 1;
  // The first turn in which something was taken out says most.
  const first = () => Math.max(0, Math.min(...runs().map((run) => {
    const at = run.turns.findIndex((turn) => turn.blocks.some(([kind]) => kind === "evicted"));
    return at < 0 ? Infinity : at;
  }).concat(last())));
  const select = make("select", { "aria-label": "Task", onchange: () => { state.task = select.value; state.turn = first(); draw(); } },
    result.tasks.map((one) => make("option", { value: one.task }, `${one.task} (${one.turns} of ${one.recorded_turns} turns)`)));
  const back = make("button", { type: "button", "aria-label": "Previous turn", onclick: () => go(state.turn - 1) }, "‹");
  const forth = make("button", { type: "button", "aria-label": "Next turn", onclick: () => go(state.turn + 1) }, "›");
  const play = make("button", { type: "button", class: "play", onclick: toggle }, "Play");
  const slider = make("input", { type: "range", min: 0, step: 1, "aria-label": "Turn", oninput: () => go(Number(slider.value)) });
  const where = make("span", { class: "where", "aria-live": "polite" });
  const strips = make("div", { class: "strips" }), plots = make("div", { class: "plots" });
  holder.append(make("h3", {}, "The context, turn by turn"), make("div", { class: "controls" }, select, back, forth, play, slider, where),
    make("div", { class: "legend" }, Object.entries(KINDS).map(([kind, text]) =>
      make("span", {}, make("span", { class: `swatch ${kind}` }), make("b", {}, kind), ` ${text}`))),
    strips, legend(arms), plots);
  holder.addEventListener("keydown", (event) => {
    if (event.target === slider || event.target === select) return;
    if (event.key === "ArrowLeft") go(state.turn - 1);
    if (event.key === "ArrowRight") go(state.turn + 1);
  });

  function stop() { clearInterval(state.playing); state.playing = null; play.textContent = "Play"; }
  function toggle() {
    if (state.playing) return stop();
    if (state.turn === last()) state.turn = 0;
    play.textContent = "Pause";
    state.playing = setInterval(() => (state.turn < last() ? go(state.turn + 1) : stop()), 900);
    draw();
  }
  function go(turn) { state.turn = Math.min(Math.max(turn, 0), last()); draw(); }

  function strip(arm, run, index, longest) {
    const turn = run.turns[state.turn], sums = { kept: 0, rotated: 0, fresh: 0, evicted: 0 };
    turn.blocks.forEach(([kind, count]) => { sums[kind] += count; });
    const said = Object.entries(sums).filter(([, count]) => count).map(([kind, count]) => `${kind} ${number(count)}`).join(" · ");
    const time = turn.ttft === null ? "" : ` · ${number(turn.ttft)} ms`;
    const why = turn.reason ? ` (${turn.reason})` : "";
    const bar = make("div", { class: "bar", role: "img", "aria-label": `${arm}, turn ${state.turn + 1}: ${said}` },
      turn.blocks.map(([kind, count]) => make("i", { class: kind, title: `${kind}: ${number(count)} tokens`, style: `width:${(100 * count) / longest}%` })));
    return make("div", { class: "strip", "data-arm": arm },
      make("div", { class: "name" }, make("span", {}, swatch(index), arm), make("span", { class: "say" }, `${turn.executed}${why} · ${said}${time}`)), bar);
  }

  function draw() {
    const chosen = runs(), size = (turn) => turn.blocks.reduce((sum, block) => sum + block[1], 0);
    const longest = Math.max(...chosen.flatMap((run) => run.turns.map(size)));
    slider.max = last(); slider.value = state.turn;
    back.disabled = state.turn === 0; forth.disabled = state.turn === last();
    where.textContent = `turn ${state.turn + 1} of ${last() + 1} · next call: ${chosen[0].turns[state.turn].tool}`;
    strips.replaceChildren(...chosen.map((run, i) => strip(arms[i], run, i, longest)));
    const curve = (value) => chosen.map((run, i) => ({ name: arms[i], colour: colour(i), points: run.turns.map((turn) => [turn.turn + 1, value(turn)]) }));
    const charts = [
      lineChart(curve((t) => t.cached / t.prompt), { label: "Hit rate per turn", top: 1, format: (v) => percent(v, 0), cursor: state.turn + 1 }),
      lineChart(curve((t) => t.prompt), { label: "Prompt tokens per turn", format: (v) => number(v), cursor: state.turn + 1 }),
    ];
    if (chosen.every((run) => run.turns.every((turn) => turn.ttft !== null))) {
      charts.splice(1, 0, lineChart(curve((t) => t.ttft), { label: "Time to first token per turn, ms", format: (v) => number(v), cursor: state.turn + 1 }));
    }
    plots.replaceChildren(...charts);
  }
  state.turn = first();
  draw();
  return holder;
}

function gymSection(result, index) {
  const arms = Object.keys(result.arms), tokens = (f, name) => number(f[name]);
  const rows = arms.map((arm, i) => {
    const f = result.arms[arm], a = f.against;
    return [make("span", {}, swatch(i), arm), `${f.solved} / ${f.runs}`, f.failed ? make("span", { class: "bad" }, String(f.failed)) : "0", tokens(f, "turns"),
      tokens(f, "prompt_tokens"), tokens(f, "prefilled_tokens"), f.ttft_ms ? number(f.ttft_ms.p50) : "–", f.ttft_ms ? number(f.ttft_ms.p95) : "–",
      number(f.seconds), a ? `+${a.only_this} −${a.only_baseline}` : "–", a ? number(a.mcnemar_p, 3) : "–"];
  });
  const rates = arms.filter((arm) => result.arms[arm].solve_rate).map((arm) => ({ name: arm, colour: colour(arms.indexOf(arm)), ...result.arms[arm].solve_rate }));
  return section(`gym-${index}`, "debug-gym: solve rates",
    make("p", {}, `${result.tasks.length} mini_nightmare tasks (${result.tasks.join(", ")}), seeds ${result.seeds.join(", ")}. Whiskers are 95 % Wilson intervals; p is the exact McNemar test over the (task, seed) pairs shared with keep-all.`),
    make("p", { class: "soft" }, result.source), rates.length ? make("div", { class: "plots" }, intervalChart(rates, "Share of runs solved")) : null,
    table(["arm", "solved", "failed runs", "turns", "prompt", "prefilled", "TTFT p50 ms", "p95", "seconds", "against keep-all", "p"], rows));
}

function fidelitySection(result, index) {
  const blocks = Object.entries(result.totals).map(([kind, total]) => {
    const both = (f) => `${percent(f.agreement, 0)} (${percent(f.agreement_low, 0)}–${percent(f.agreement_high, 0)})`;
    const rows = Object.entries(total.arms).map(([arm, f]) => [arm, both(f.against_full), number(f.against_full.overlap, 2), number(f.against_full.kl_mean, 3),
      both(f.against_reprefill), number(f.against_reprefill.overlap, 2), number(f.against_reprefill.kl_mean, 3)]);
    const r = total.references;
    rows.push(["re-prefill itself", both(r), number(r.overlap, 2), number(r.kl_mean, 3), "100 %", "1.00", "0.000"]);
    return [make("h3", {}, `${kind}: ${total.cases} cases, ${total.distance_tokens.min}–${total.distance_tokens.max} tokens after the last edit`),
      table(["arm", "as full context", "top-10 overlap", "KL", "as re-prefill", "top-10 overlap", "KL"], rows)];
  });
  const groups = result.groups.filter((g) => g.arms.amortize).map((g) => [`${g.kind}, ≤ ${number(g.bucket_chars)} characters, ${g.edits} edit${g.edits > 1 ? "s" : ""}`,
    number(g.cases), percent(g.arms.amortize.against_full.agreement, 0), percent(g.arms.amortize.against_reprefill.agreement, 0), number(g.arms.amortize.against_full.kl_mean, 3)]);
  return section(`fidelity-${index}`, `Fidelity: ${result.model}`,
    make("p", {}, "Same first token as the full context, and as a re-prefill of the edited one, with 95 % intervals; KL in nats is a lower bound."),
    measuredOn(result), ...blocks.flat(), groups.length ? make("h3", {}, "Amortize over distance and number of edits") : null,
    groups.length ? table(["cases", "n", "as full context", "as re-prefill", "KL to full"], groups) : null);
}

function mechanismSection(result, index) {
  const arms = [...new Set(result.rows.map((row) => row.arm))];
  const rows = result.rows.map((row) => [make("span", {}, swatch(arms.indexOf(row.arm)), row.arm), number(row.concurrency), number(row.requests), percent(row.hit_rate),
    number(row.latency_ms.p50), number(row.latency_ms.p95), number(row.seconds, 1)]);
  const curve = (value) => arms.map((arm, i) => ({ name: arm, colour: colour(i), points: result.rows.filter((row) => row.arm === arm).map((row) => [row.concurrency, value(row)]) }));
  const ttft = (result.ttft || []).map((row) => [row.configuration, number(row.prompt_tokens), number(row.ttft_ms.p50), number(row.ttft_ms.p95), row.summary_ms ? number(row.summary_ms.p50) : "–", number(row.prefilled_tokens)]);
  const w = result.workload;
  return section(`mechanism-${index}`, "Mechanism: hit rate and latency under load",
    make("p", {}, `${w.sessions} sessions × ${w.turns} turns, ${number(w.system_tokens)} system tokens, ${number(w.turn_tokens)} a turn, one eviction a turn.`),
    measuredOn(result), result.rows.length ? table(["arm", "concurrency", "requests", "hit rate", "p50 ms", "p95 ms", "seconds"], rows) : null,
    result.rows.length ? legend(arms) : null,
    result.rows.length ? make("div", { class: "plots" }, lineChart(curve((r) => r.hit_rate), { label: "Hit rate by concurrency", top: 1, format: (v) => percent(v, 0), log: true }),
      lineChart(curve((r) => r.latency_ms.p50), { label: "p50 latency by concurrency, ms", format: (v) => number(v), log: true })) : null,
    ttft.length ? make("h3", {}, "Long context: time to first token after compaction") : null,
    ttft.length ? table(["configuration", "prompt", "TTFT p50 ms", "p95", "of it summariser", "prefilled"], ttft) : null);
}

function driftSection(result, index) {
  const names = [...new Set(result.rows.map((row) => `${row.storage}, ${row.math} math`))];
  const pick = (name, chained) => result.rows.filter((row) => `${row.storage}, ${row.math} math` === name && row.chained === chained)
    .map((row) => [row.rotations, row.relative_l2]);
  const series = names.flatMap((name, i) => [{ name: `${name}, chained`, colour: colour(i), points: pick(name, true) },
    { name: `${name}, once`, colour: colour(i), dash: true, points: pick(name, false) }]).filter((one) => one.points.length);
  return section(`drift-${index}`, "Drift: chained rotations against one",
    make("p", {}, "Relative L2 error of K after n rotations: chained (solid) and once by the sum (dashed)."), legend(names),
    make("div", { class: "plots" }, lineChart(series, { label: "Relative L2 by rotations", format: (v) => v.toExponential(0), log: true, logY: true })));
}

const DRAW = { replay: replaySection, gym: gymSection, mechanism: mechanismSection, fidelity: fidelitySection, drift: driftSection };
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
page.replaceChildren(make("header", {}, make("h1", {}, document.title),
  make("p", { class: "soft" }, "KV cache edits for agents: what they save, what they keep, what they help.")));
for (const [name, draw] of Object.entries(DRAW)) (data[name] || []).forEach((result, index) => page.append(draw(result, index)));
