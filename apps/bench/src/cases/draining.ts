import { CONTENDERS, type ContenderName, type Mode } from '../contenders/contender';
import type { Behaviour } from '../contenders/protocol';
import type { Plan } from '../plan';
import type { BenchCase, CaseContext } from './bench-case';
import { drain } from './drain';

const CAP_SECONDS = 2;
/** Handlers at once in work5. */
const LOOPS = 200;

/** BullMQ on PostgreSQL does 2 000 a second: with as many jobs as the others its turn alone would take minutes. */
export const jobsOf = (plan: Plan, contender: ContenderName): number =>
  contender === 'bullpg' ? plan.jobs(5000, 1000) : plan.jobs(200_000, 60_000);

interface Shape {
  name: string;
  title: string;
  processes: number;
  mode?: Mode;
  concurrency?: number;
  behaviour?: Behaviour;
  payloadBytes?: number;
  jobs?: (plan: Plan, contender: ContenderName) => number;
}

const draining = ({ name, title, jobs = jobsOf, ...shape }: Shape): BenchCase => ({
  name,
  title,
  unit: 'jobs/s',
  better: 'higher',
  contenders: () => CONTENDERS,
  run: async ({ lab, plan, contender }) =>
    lab.trial(contender, async (trial) => {
      const { rssBytes: _, ...measured } = await drain(trial, { ...shape, jobs: jobs(plan, contender) });
      return measured;
    }),
});

/** What one process can do with such handlers and no queue at all; measured once a round. */
async function capOf({ lab, plan, soFar }: CaseContext): Promise<number> {
  const known = soFar.get('cap');
  if (known !== undefined) return known;
  const agent = await lab.fleet.start('none', 'cap');
  try {
    const cap = await agent.call('loops', { loops: LOOPS, seconds: plan.seconds(CAP_SECONDS, CAP_SECONDS) });
    soFar.set('cap', cap);
    return cap;
  } finally {
    await lab.fleet.end(agent);
  }
}

const work5 = draining({
  name: 'work5',
  title: 'handlers that wait 0 to 10 ms, 200 at once',
  processes: 1,
  mode: 'async',
  concurrency: LOOPS,
  behaviour: 'wait',
});

export const drainingCases: BenchCase[] = [
  draining({ name: 'drain', title: 'handlers that do nothing, 1 process', processes: 1 }),
  draining({ name: 'drain2', title: 'handlers that do nothing, 2 processes', processes: 2 }),
  draining({ name: 'drain4', title: 'handlers that do nothing, 4 processes', processes: 4 }),
  {
    ...work5,
    run: async (context) => {
      const cap = await capOf(context);
      const measured = await work5.run(context);
      const [one] = Array.isArray(measured) ? measured : [measured];
      if (!one) return [];
      return { ...one, detail: { ...one.detail, cap, shareOfCap: one.value / cap } };
    },
  },
  draining({ name: 'payload1500', title: 'payload of 1.5 KB, 1 process', processes: 1, payloadBytes: 1500 }),
  draining({
    name: 'payload100k',
    title: 'payload of 100 KB, 1 process',
    processes: 1,
    mode: 'large',
    payloadBytes: 100_000,
    jobs: (plan) => plan.jobs(2000, 500),
  }),
];
