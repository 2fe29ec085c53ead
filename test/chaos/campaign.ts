import { setTimeout as sleep } from 'node:timers/promises';
import { Clients } from './clients';
import { FAULTS, SCENARIOS, type Stage } from './faults';
import { Fleet } from './fleet';
import { LEDGER, Ledger } from './ledger';
import type { ChaosOptions } from './options';
import { Random } from './random';
import { type Breach, breaches, historyOf } from './rules';
import type { Store } from './store';
import { type Summary, summarize } from './summary';
import { Trouble } from './trouble';

/** How long the fleet may take for what is left, when the faults are over. */
const REST_MS = 120_000;

export interface Verdict {
  summary: Summary;
  breaches: Breach[];
}

/** A fleet, its producers and an operator on a database, under faults; then what the ledger and the tables say of it. */
export async function campaign(store: Store, options: ChaosOptions, say: (text: string) => void): Promise<Verdict> {
  const { seed, seconds, scenarios, workers } = options;
  const ledger = new Ledger(store.url);
  const fleet = new Fleet(store.url, workers);
  let clients: Clients | undefined;
  try {
    await ledger.read(LEDGER);
    clients = await Clients.open(store.url, ledger, seed);
    const trouble = new Trouble(() => store.url, ledger);
    await trouble.prepare();
    await fleet.fill();
    clients.start();
    const stage = { fleet, store, trouble, clients, ledger };
    const until = performance.now() + seconds * 1000;
    for (const [i, scenario] of scenarios.entries()) {
      const ends = until - ((scenarios.length - 1 - i) * seconds * 1000) / scenarios.length;
      say(`${scenario}: ${await play(scenario, seed, stage, ends)} faults`);
    }
    await ledger.write(
      `INSERT INTO ledger.faults (fault, detail, ended_at) VALUES ('none', 'the faults are over', now())`,
      [],
    );
    await clients.stop();
    say('the faults are over; waiting for what is left');
    await settled(ledger, clients);
    const killed = await fleet.stop();
    await clients.close();
    // The sessions of processes that have just ended are gone a moment later.
    await sleep(500);
    const found = await breaches(ledger);
    if (killed > 0) found.push({ what: 'a worker had to be killed at the end', count: killed, job: null });
    for (const { what, count, job } of found) {
      say(`BREACH (seed ${seed}): ${what}: ${count}${job === null ? '' : `, the first of ${job}`}`);
      if (job !== null) for (const event of await historyOf(ledger, job)) say(`  ${JSON.stringify(event)}`);
    }
    return { summary: await summarize(ledger, seed, found), breaches: found };
  } finally {
    await fleet.stop(0).catch(() => 0);
    await clients?.close().catch(() => undefined);
    await ledger.close().catch(() => undefined);
  }
}

/** @returns how many faults there were */
async function play(scenario: string, seed: number, stage: Omit<Stage, 'random'>, ends: number): Promise<number> {
  const { faults, everyMs } = SCENARIOS[scenario] ?? { faults: [], everyMs: [1000, 1000] };
  const random = Random.for(seed, `faults ${scenario}`);
  let count = 0;
  // One at least, however little time there is.
  do {
    const fault = random.pick(faults);
    // Of its own, so that what one fault draws does not move the next.
    const own = Random.for(seed, `${scenario} ${count++}`);
    // Written down before it begins, or what it does would come before it; whom it has hit is known when it is over.
    const id = await stage.ledger.insert(`INSERT INTO ledger.faults (fault) VALUES ($1) RETURNING id`, [fault]);
    const done = await FAULTS[fault]({ ...stage, random: own });
    await stage.ledger.write(
      done
        ? `UPDATE ledger.faults SET ended_at = clock_timestamp(), victim = $2, detail = $3 WHERE id = $1`
        : `DELETE FROM ledger.faults WHERE id = $1 AND $2::text IS NULL AND $3::text IS NULL`,
      [id, done?.victim ?? null, done?.detail ?? null],
    );
    await sleep(Math.min(random.int(...everyMs), Math.max(0, ends - performance.now())));
  } while (performance.now() < ends);
  return count;
}

/** Until nothing is unfinished; what the operator has left paused is resumed. */
async function settled(ledger: Ledger, clients: Clients): Promise<void> {
  for (const ends = performance.now() + REST_MS; performance.now() < ends;) {
    const [row] = await ledger
      .read<{ left: number; paused: number }>(
        `SELECT (SELECT count(*) FROM leasehold.ready)::int + (SELECT count(*) FROM leasehold.waiting)::int + (SELECT count(*) FROM leasehold.leases)::int
           + (SELECT count(*) FROM leasehold.batches WHERE status = 'running')::int AS left,
         (SELECT count(*) FROM leasehold.waiting WHERE reason = 'paused')::int AS paused`,
      )
      .catch(() => []);
    if (row?.left === 0) return;
    if (row && row.paused > 0) await clients.jobs.steerMany('resume', { state: 'paused' }).catch(() => undefined);
    await sleep(250);
  }
}
