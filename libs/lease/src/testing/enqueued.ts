import type { HandlerClass, PayloadOf } from '../handlers/handler.types';
import { InvalidJobError } from '../errors';
import type { JobTarget } from '../jobs/job-enqueue';
import type { JobStatus } from '../jobs/job.types';
import { statusColumns } from '../jobs/jobs.sql';
import { didYouMean } from '../options/suggest';
import { type CallerTransaction, isTransactional, TRANSACTION_KEYS } from '../storage/caller-transaction';
import { ExpectationError } from './errors';
import type { LeaseParts } from './lease-parts';
import { type PayloadMatcher, mismatches, show } from './payload-matcher';
import { TestTransaction } from './test-transaction';
import type { TestingDatabase } from './testing-database';

/** Which jobs count. With `manager`, `queryRunner` or `client`: also what was enqueued in that transaction and is not committed yet. */
export interface EnqueuedOptions extends CallerTransaction {
  /** Only jobs of this queue. */
  queue?: string;
  /** Exactly so many must fit. Default: at least one. */
  count?: number;
}

type Payload<T> = T extends HandlerClass ? PayloadOf<T> : unknown;
export type EnqueuedJob<T> = JobStatus<Payload<T>>;

/** More than a test enqueues; fewer than a message or a comparison would choke on. */
const MOST = 10_000;
const LISTED = 10;
const KINDS_LISTED = 20;

/** The jobs of a kind, the oldest first, whatever has become of them. Locks nothing. */
const ofKindSql = (s: string): string =>
  `SELECT ${statusColumns} FROM ${s}.job_status j WHERE j.kind = $1 ORDER BY j.id LIMIT ${MOST}`;

/** How many jobs of each other kind there are. Locks nothing. */
const otherKindsSql = (s: string): string =>
  `SELECT kind, count(*)::int AS count FROM ${s}.jobs WHERE kind <> $1 GROUP BY kind ORDER BY kind LIMIT ${KINDS_LISTED}`;

interface Looked {
  kind: string;
  fitting: JobStatus[];
  /** With what is wrong with each. */
  others: { job: JobStatus; why: string[] }[];
  kinds: { kind: string; count: number }[];
}

/** Says what was enqueued, and compares it with what a test expects. */
export class Enqueued {
  constructor(
    private readonly parts: LeaseParts,
    private readonly database: TestingDatabase,
  ) {}

  /** @throws ExpectationError */
  async expect<T extends JobTarget>(
    target: T,
    matcher: PayloadMatcher<Payload<T>> | undefined,
    options: EnqueuedOptions,
  ): Promise<EnqueuedJob<T>[]> {
    const { count } = options;
    if (count !== undefined && (!Number.isInteger(count) || count < 1)) {
      throw new InvalidJobError(`count = ${count} must be a whole number from 1; for none: expectNotEnqueued`, 'count');
    }
    const looked = await this.look(target, matcher, options);
    const { length } = looked.fitting;
    if (count === undefined ? length > 0 : length === count) return looked.fitting as EnqueuedJob<T>[];
    const wanted = `${wantedText(looked.kind, matcher, options)} was enqueued`;
    const title = count === undefined ? `No ${wanted}` : `Not ${count}, but ${length}: ${wanted}`;
    throw new ExpectationError([title, ...report(looked)].join('\n'));
  }

  /** @throws ExpectationError */
  async expectNone<T extends JobTarget>(
    target: T,
    matcher: PayloadMatcher<Payload<T>> | undefined,
    options: EnqueuedOptions,
  ): Promise<void> {
    const { kind, fitting } = await this.look(target, matcher, options);
    if (fitting.length === 0) return;
    const wanted = wantedText(kind, matcher, options);
    const title = `${fitting.length === 1 ? 'A' : `${fitting.length} times a`} ${wanted} was enqueued:`;
    throw new ExpectationError([title, ...fitting.slice(0, LISTED).map((job) => `  ${line(job)}`)].join('\n'));
  }

  private async look(
    target: JobTarget,
    matcher: unknown,
    { queue, count: _count, ...transaction }: EnqueuedOptions,
  ): Promise<Looked> {
    const unknown = Object.keys(transaction).find((key) => !(TRANSACTION_KEYS as readonly string[]).includes(key));
    if (unknown !== undefined) {
      throw new InvalidJobError(
        `There is no option '${unknown}' here${didYouMean(unknown, ['queue', 'count', ...TRANSACTION_KEYS])}`,
        unknown,
      );
    }
    const kind = this.kindOf(target);
    const send = await this.senderFor(transaction);
    const s = this.database.schema.quoted;
    const jobs = await send<JobStatus & Record<string, unknown>>(ofKindSql(s), [kind]);
    const judged = jobs.map((job) => ({
      job,
      why: [
        ...(queue === undefined || job.queue === queue ? [] : [`it is in queue '${job.queue}', not '${queue}'`]),
        ...mismatches(matcher, job),
      ],
    }));
    const fitting = judged.flatMap(({ job, why }) => (why.length === 0 ? [job] : []));
    const kinds = await send<{ kind: string; count: number }>(otherKindsSql(s), [kind]);
    return { kind, fitting, others: judged.filter(({ why }) => why.length > 0), kinds };
  }

  private async senderFor(
    transaction: CallerTransaction,
  ): Promise<<R extends Record<string, unknown>>(text: string, values: unknown[]) => Promise<R[]>> {
    if (!isTransactional(transaction)) return (text, values) => this.database.query(text, values);
    const target = transaction.manager ?? transaction.queryRunner ?? transaction.client;
    const limitMs = this.parts.options.connection.queryTimeoutMs;
    const given = await TestTransaction.of(target!, limitMs, () => undefined);
    const { test } = this.database;
    return (text, values) => (test?.client === given.client ? test : given).run(text, values);
  }

  /** @throws InvalidJobError for a class that is no handler of this lease instance */
  kindOf(target: JobTarget): string {
    if (typeof target === 'string') return target;
    const definition = typeof target === 'function' ? this.parts.registry.of(target) : undefined;
    if (definition) return definition.kind;
    const name = typeof target === 'function' ? (target as { name: string }).name : String(target);
    throw new InvalidJobError(
      `${name} is no class decorated with @JobHandler for the lease instance '${this.parts.options.name}'`,
      'handler',
    );
  }
}

const wantedText = (kind: string, matcher: unknown, { queue }: EnqueuedOptions): string =>
  `job '${kind}'${queue === undefined ? '' : ` in queue '${queue}'`}${
    matcher === undefined
      ? ''
      : typeof matcher === 'function'
        ? ' that the given function accepts'
        : ` with a payload like ${show(matcher)}`
  }`;

const line = ({ id, state, queue, payload }: JobStatus): string => `${id} ${state} in '${queue}': ${show(payload)}`;

function report({ kind, fitting, others, kinds }: Looked): string[] {
  const total = fitting.length + others.length;
  const listed = [
    ...fitting.map((job) => `  ${line(job)} - fits`),
    ...others.map(({ job, why }) => `  ${line(job)} - ${why.join('; ')}`),
  ];
  const more = listed.length - LISTED;
  return [
    total === 0
      ? `Of kind '${kind}' nothing was enqueued${kindHint(kind, kinds)}`
      : `Of kind '${kind}' there are ${total}:`,
    ...listed.slice(0, LISTED),
    ...(more > 0 ? [`  and ${more} more`] : []),
    kinds.length === 0
      ? 'No other kind was enqueued'
      : `Other kinds: ${kinds.map((other) => `${other.kind} (${other.count})`).join(', ')}`,
  ];
}

const kindHint = (kind: string, kinds: { kind: string }[]): string =>
  didYouMean(
    kind,
    kinds.map((other) => other.kind),
  );
