import { loadavg } from 'node:os';
import type { BenchOptions } from './cli';
import { type BenchCase, CASES } from './cases';
import { type ContenderName, type PeerName, STORES } from './contenders/contender';
import { describeMachine } from './environment/machine';
import { installPeers, versionOf } from './environment/peers';
import { POSTGRES_SETTINGS } from './environment/postgres';
import { redisVersion } from './environment/redis';
import { messageOf } from './errors';
import { Lab } from './lab';
import { serverVersion } from './measure/database';
import { rounded } from './measure/statistics';
import { Plan } from './plan';
import { type CaseResult, type ContenderResult, type Results, type Samples, summarise } from './results';

/** More than a benchmark should find on the machine that it measures. */
const BUSY_LOAD = 0.5;

export interface Reporter {
  /** For whoever watches. */
  say(text: string): void;
  /** A case is finished. */
  result(result: CaseResult): void;
}

/** Measures what the options ask for. */
export async function run(options: BenchOptions, command: string, signal: AbortSignal, to: Reporter): Promise<Results> {
  const plan = new Plan(options.quick, options.scale);
  const loadBefore = rounded(loadavg()[0] ?? NaN);
  const cases = CASES.filter(({ name, contenders }) => options.only.includes(name) && contenders(plan).length > 0);
  const wanted = options.peers.filter((peer) =>
    cases.some((one) => one.contenders(plan).includes(peer) || one.documented?.includes(peer)),
  );
  if (wanted.length > 0) await installPeers(signal, (text) => to.say(text));
  const lab = await Lab.open(signal);
  try {
    const skipped: Results['skipped'] = {};
    const redis = wanted.some((peer) => STORES[peer] === 'redis') ? redisVersion() : undefined;
    if (redis !== undefined) await lab.addRedis(redis);
    const contenders: Results['contenders'] = {};
    for (const contender of ['ours', ...wanted] as const) {
      signal.throwIfAborted();
      try {
        if (STORES[contender] === 'redis' && redis === undefined)
          throw new Error('there is no redis-server on the PATH');
        contenders[contender] = await describe(lab, contender);
      } catch (error) {
        if (contender === 'ours') throw error;
        skipped[contender] = messageOf(error);
        to.say(`${contender} is left out: ${messageOf(error)}`);
      }
    }
    const results: Results = {
      commands: [command],
      quick: options.quick,
      scale: options.scale,
      machine: describeMachine(),
      loadBefore,
      versions: {
        node: await lab.fleet.nodeVersion(),
        postgres: await serverVersion(lab.postgres.url),
        redis: redis ?? null,
      },
      postgresSettings: POSTGRES_SETTINGS,
      contenders,
      skipped,
      cases: [],
    };
    to.say(environmentText(results));
    await measure({ lab, plan, cases, rounds: options.rounds, results, to });
    return results;
  } catch (error) {
    signal.throwIfAborted();
    throw error;
  } finally {
    await lab.close();
  }
}

async function describe(lab: Lab, contender: ContenderName): Promise<ContenderResult> {
  const agent = await lab.fleet.start(contender, 'introduction');
  try {
    const about = await agent.call('describe');
    return { ...about, version: versionOf(about.package) };
  } finally {
    await lab.fleet.end(agent);
  }
}

function environmentText({ machine, loadBefore, versions, contenders }: Results): string {
  const names = Object.values(contenders).map(({ title, version }) => `${title} ${version}`);
  return [
    `${machine.cpu}, ${machine.cores} cores, ${machine.memoryGb} GB, ${machine.os}`,
    `all on Node ${versions.node}; PostgreSQL ${versions.postgres}${versions.redis === null ? '' : `; Redis ${versions.redis} (not durable)`}`,
    names.join(', '),
    ...(loadBefore > BUSY_LOAD
      ? [`this machine is busy (load ${loadBefore} in the last minute): what follows is worth less`]
      : []),
  ].join('\n');
}

interface Session {
  lab: Lab;
  plan: Plan;
  cases: BenchCase[];
  rounds: number;
  results: Results;
  to: Reporter;
}

async function measure(session: Session): Promise<void> {
  const { cases, rounds, results, to } = session;
  const samples = new Map(cases.map((one) => [one.name, new Map() as Samples]));
  const limits = Object.fromEntries(
    Object.entries(results.contenders).flatMap(([name, { recovery }]) => (recovery ? [[name, recovery.seconds]] : [])),
  ) as Partial<Record<PeerName, number>>;
  for (let round = 0; round < rounds; round++) {
    const soFar = new Map<string, number>();
    for (const one of cases) {
      const mine = samples.get(one.name) as Samples;
      if (!one.once || round === 0) await measureCase(session, one, round, mine, soFar);
      if (round < rounds - 1) continue;
      const result = summarise(one, mine, limits);
      results.cases.push(result);
      to.result(result);
    }
  }
}

/** All contenders one after the other, in an order that changes from round to round: nobody always runs on the warm machine. */
async function measureCase(
  { lab, plan, rounds, results, to }: Session,
  one: BenchCase,
  round: number,
  samples: Samples,
  soFar: Map<string, number>,
): Promise<void> {
  const present = one.contenders(plan).filter((contender) => results.contenders[contender]);
  const turn = round % present.length;
  for (const contender of [...present.slice(turn), ...present.slice(0, turn)]) {
    lab.signal.throwIfAborted();
    const mine = samples.get(contender) ?? [];
    samples.set(contender, mine);
    const label = `${rounds > 1 ? `round ${round + 1} of ${rounds}, ` : ''}${one.name}, ${contender}`;
    try {
      const measured = await one.run({ lab, plan, contender, soFar });
      const all = Array.isArray(measured) ? measured : [measured];
      mine.push(all);
      for (const { value } of all) {
        soFar.set(`${one.name}:${contender}`, value);
        to.say(`${label}: ${value.toPrecision(4)} ${one.unit}`);
      }
    } catch (error) {
      lab.signal.throwIfAborted();
      mine.push(undefined);
      to.say(`${label}: failed: ${messageOf(error)}`);
    }
  }
}
