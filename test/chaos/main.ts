import 'reflect-metadata';
import { setTimeout as sleep } from 'node:timers/promises';
import { startEmbeddedPostgres } from '@leasehold/embedded-postgres';
import { Clients } from './clients';
import { FAULTS, SCENARIOS } from './faults';
import { Fleet } from './fleet';
import { LEDGER, Ledger } from './ledger';
import { type ChaosOptions, HELP, UsageError, readOptions } from './options';
import { Random } from './random';
import { breaches, historyOf, summarize } from './verify';

/** How long the fleet may take for what is left, when the faults are over. */
const REST_MS = 120_000;

async function run(options: ChaosOptions, say: (text: string) => void): Promise<number> {
  const { seed, seconds, scenarios, workers } = options;
  say(`seed ${seed}, ${seconds} s of ${scenarios.join(', ')}, ${workers} workers`);
  const postgres = await startEmbeddedPostgres({ database: 'chaos', settings: { max_connections: '200' } });
  const ledger = new Ledger(postgres.url);
  const fleet = new Fleet(postgres.url, workers);
  try {
    await ledger.read(LEDGER);
    const clients = await Clients.open(postgres.url, ledger, seed);
    await fleet.fill();
    clients.start();
    const until = performance.now() + seconds * 1000;
    const stopping = new AbortController();
    for (const [i, scenario] of scenarios.entries()) {
      const ends = until - ((scenarios.length - 1 - i) * seconds * 1000) / scenarios.length;
      const random = Random.for(seed, `faults ${scenario}`);
      const { faults, everyMs } = SCENARIOS[scenario] ?? { faults: [], everyMs: [1000, 1000] };
      let count = 0;
      while (performance.now() < ends) {
        const name = random.pick(faults);
        // Of its own, so that what one fault draws does not move the next.
        const own = Random.for(seed, `${scenario} ${count++}`);
        await ledger.write(`INSERT INTO ledger.faults (fault, detail) VALUES ($1, '')`, [name]);
        await FAULTS[name]({ fleet, postgres, ledger, random: own, signal: stopping.signal });
        await sleep(random.int(...everyMs));
      }
      say(`${scenario}: ${count} faults`);
    }
    await ledger.write(`INSERT INTO ledger.faults (fault, detail) VALUES ('none', 'the faults are over')`, []);
    await clients.stop();
    say('the faults are over; waiting for what is left');
    await settled(ledger, clients);
    const killed = await fleet.stop();
    await clients.close();
    // The sessions of processes that have just ended are gone a moment later.
    await sleep(500);
    const found = await breaches(ledger);
    if (killed > 0) found.push({ what: 'a worker had to be killed at the end', count: killed, job: null });
    const summary = await summarize(ledger, seed, found);
    for (const { what, count, job } of found) {
      say(`BREACH (seed ${seed}): ${what}: ${count}${job === null ? '' : `, the first of ${job}`}`);
      if (job !== null) for (const event of await historyOf(ledger, job)) say(`  ${JSON.stringify(event)}`);
    }
    say(found.length === 0 ? 'every rule holds' : `${found.length} rules are broken`);
    process.stdout.write(options.json ? `${JSON.stringify(summary)}\n` : `${JSON.stringify(summary, null, 2)}\n`);
    return found.length === 0 ? 0 : 1;
  } finally {
    await fleet.stop(0).catch(() => 0);
    await ledger.close().catch(() => undefined);
    await postgres.stop();
  }
}

/** Until nothing is unfinished; what the operator had paused just before its end is resumed again. */
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

async function main(): Promise<number> {
  try {
    const options = readOptions(process.argv.slice(2));
    if (options === 'help') {
      process.stdout.write(`${HELP}\n`);
      return 0;
    }
    return await run(options, (text) => process.stderr.write(`${text}\n`));
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    process.stderr.write(`${error.message}\n`);
    return 2;
  }
}

void main().then(
  (code) => process.exit(code),
  (error: unknown) => {
    process.stderr.write(`${error instanceof Error ? (error.stack ?? error.message) : String(error)}\n`);
    process.exit(1);
  },
);
