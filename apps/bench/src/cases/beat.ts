import { monotonicMs } from '../contenders/protocol';
import { onCpuNs } from '../measure/cpu';
import type { Measurement } from '../measure/measurement';
import type { Trial } from '../trial';
import type { BenchCase } from './bench-case';

const LEASES = 50_000;
/** After a beat the worker compares its leases with the database's, over the same connection; that is part of it. */
const AFTERMATH_MS = 3000;
const BEAT_MOST_MS = 60_000;

/** The backend of the only worker's beat connection, which is named after the worker's lock. */
const BACKEND = `
  SELECT a.pid FROM leasehold.workers w JOIN pg_stat_activity a ON a.application_name LIKE 'lh:%:' || w.lock_no
  WHERE w.state = 'live' AND a.datname = current_database()`;

async function beatAt(trial: Trial): Promise<string> {
  const [row] =
    (await trial.database?.query<{ at: string }>('SELECT max(beat_at)::text AS at FROM leasehold.workers')) ?? [];
  return row?.at ?? '';
}

async function untilNextBeat(trial: Trial): Promise<void> {
  const before = await beatAt(trial);
  for (const beganAt = monotonicMs(); monotonicMs() - beganAt < BEAT_MOST_MS;) {
    if ((await beatAt(trial)) !== before) return;
    await trial.pause(50);
  }
  throw new Error('the worker does not beat');
}

async function measure(trial: Trial, leases: number, beats: number): Promise<Measurement> {
  await trial.operator.call('startProducer', { callers: 2 });
  await trial.fill(leases);
  await trial.rest();
  const workers = await trial.loadWorkers(1);
  await trial.startWorkers(workers, { mode: 'throughput', concurrency: leases, behaviour: 'hold', keepStarts: false });
  await trial.untilStarted(workers, leases);
  await untilNextBeat(trial);
  await trial.pause(AFTERMATH_MS);
  const [backend] = (await trial.database?.query<{ pid: number }>(BACKEND)) ?? [];
  if (!backend) throw new Error('the session of the beat was not found');
  const before = onCpuNs(backend.pid) ?? NaN;
  const walBefore = (await trial.read()).walBytes ?? NaN;
  for (let i = 0; i < beats; i++) await untilNextBeat(trial);
  await trial.pause(AFTERMATH_MS);
  const nsOfBeat = ((onCpuNs(backend.pid) ?? NaN) - before) / beats;
  const walBytes = ((await trial.read()).walBytes ?? NaN) - walBefore;
  return { value: nsOfBeat / 1e6, detail: { leases, beats, walBytesPerBeat: walBytes / beats } };
}

export const beatCases: BenchCase[] = [
  {
    name: 'beat50k',
    title: 'database time of a beat with 50 000 leases in flight in one process',
    unit: 'ms',
    better: 'lower',
    contenders: () => ['ours'],
    run: ({ lab, plan, contender }) =>
      lab.trial(contender, (trial) => measure(trial, plan.jobs(LEASES, LEASES), plan.pick(3, 1))),
  },
];
