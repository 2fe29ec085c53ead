import { type ContenderName, PEERS } from '../contenders/contender';
import { monotonicMs } from '../contenders/protocol';
import type { Measurement } from '../measure/measurement';
import type { Trial } from '../trial';
import type { BenchCase } from './bench-case';
import { CONCURRENCY } from './drain';

/** Until a leader has been elected, and rescue has seen both workers. */
const SETTLED_MS = 4000;
const LEADER = `SELECT w.pid FROM leasehold.leader l JOIN leasehold.workers w ON w.id = l.worker_id`;

/** One job that never ends, in one of two processes; that one is struck, and the other must start it again. */
async function strike(trial: Trial, signal: 'SIGKILL' | 'SIGSTOP'): Promise<Measurement> {
  await trial.operator.call('startProducer', { callers: 1 });
  const workers = await trial.loadWorkers(2);
  await trial.startWorkers(workers, {
    mode: 'latency',
    concurrency: CONCURRENCY,
    behaviour: 'hold',
    keepStarts: false,
  });
  await trial.fill(1);
  await trial.untilStarted(workers, 1);
  await trial.pause(SETTLED_MS);
  const victim = workers.find(({ progress }) => progress.started > 0);
  const heir = workers.find((worker) => worker !== victim);
  if (!victim || !heir) throw new Error('the job runs in both processes');
  const [leader] = (await trial.database?.query<{ pid: number }>(LEADER)) ?? [];
  const struckAt = monotonicMs();
  victim.kill(signal);
  await trial.untilStarted([heir], 1);
  const seconds = (heir.progress.firstAt - struckAt) / 1000;
  // A new leader must be found first; the two are told apart, for chance decides who led.
  return { value: seconds, detail: { [leader?.pid === victim.pid ? 'victimLed' : 'heirLed']: seconds } };
}

const recovery = (name: string, title: string, signal: 'SIGKILL' | 'SIGSTOP'): BenchCase => ({
  name,
  title,
  unit: 's',
  better: 'lower',
  contenders: (): ContenderName[] => ['ours'],
  documented: PEERS,
  once: true,
  run: async ({ lab, plan, contender }) => {
    const times: Measurement[] = [];
    for (let i = 0; i < plan.pick(5, 1); i++) times.push(await lab.trial(contender, (trial) => strike(trial, signal)));
    return times;
  },
});

export const recoveryCases: BenchCase[] = [
  recovery('recoverKill', 'until a job of a killed process (SIGKILL) starts again', 'SIGKILL'),
  recovery('recoverStop', 'until a job of a frozen process (SIGSTOP) starts again', 'SIGSTOP'),
];
