import { InvalidBatchError, InvalidJobError } from '../errors';
import type { JobEnqueue } from '../jobs/job-enqueue';
import type { PreparedJob } from '../jobs/enqueue-request';
import { didYouMean } from '../options/suggest';
import { isName } from '../options/validators';
import { TRANSACTION_KEYS } from '../storage/caller-transaction';
import type { BatchMember } from './batch.types';

export const MAX_MEMBERS = 200_000;
const MAX_EDGES = 1_000_000;
const LISTED = 10;
const KEYS = ['key', 'keyMode', 'keyScope'] as const;

/** A member, checked, and what it waits for. */
export interface PlannedMember {
  /** Its place in the list that was given. */
  index: number;
  job: PreparedJob;
  name: string | undefined;
  /** Name -> whether any end will do. */
  needs: Map<string, boolean>;
}

/**
 * Checks members, and puts those that others need before these: ids then rise along the edges.
 * @param known whether names that are not in the list may be in the batch already; they are then looked up by the caller
 * @throws InvalidBatchError naming the members; nothing has been written
 */
export async function planMembers(
  members: readonly BatchMember[],
  enqueue: JobEnqueue,
  known: boolean,
): Promise<PlannedMember[]> {
  if (!Array.isArray(members)) throw new InvalidBatchError('members must be an array', 'members');
  if (members.length > MAX_MEMBERS) {
    throw new InvalidBatchError(
      `a call takes at most ${MAX_MEMBERS} members, not ${members.length}: create the batch open, and add the rest`,
      'members',
    );
  }
  const planned: PlannedMember[] = [];
  for (const [index, member] of (members as readonly BatchMember[]).entries()) {
    planned.push(await planMember(member, index, enqueue));
  }
  const byName = refuseDuplicates(planned);
  refuseUnknown(planned, byName, known);
  return inOrder(planned, byName);
}

async function planMember(member: BatchMember, index: number, enqueue: JobEnqueue): Promise<PlannedMember> {
  if (typeof member !== 'object' || member === null) {
    throw new InvalidBatchError(
      `[${index}] a member must be { handler, payload, … }, not ${String(member)}`,
      'members',
    );
  }
  const { handler, payload, name, dependsOn, ...options } = member;
  const label = name === undefined ? `[${index}]` : `[${index}] ${JSON.stringify(name)}`;
  if (name !== undefined && !isName(name)) {
    throw new InvalidBatchError(
      `[${index}] name = ${JSON.stringify(name)} must be text of 1 to 200 bytes without NUL or lone surrogates`,
      `[${index}].name`,
    );
  }
  for (const key of [...KEYS, ...TRANSACTION_KEYS]) {
    if (key in options) {
      const instead = KEYS.includes(key as never)
        ? 'within a batch a member is unique by its name'
        : 'give it to the call, not to a member';
      throw new InvalidBatchError(
        `${label}: '${key}' is not for members: ${instead}`,
        `[${index}].${key}`,
        named(name),
      );
    }
  }
  const needs = needsOf(dependsOn, index, label, name);
  try {
    const job = enqueue.prepare(handler, payload, options);
    return { index, job: job instanceof Promise ? await job : job, name, needs };
  } catch (error) {
    if (!(error instanceof InvalidJobError)) throw error;
    throw new InvalidBatchError(`${label}: ${error.message}`, `[${index}].${error.field}`, named(name), {
      cause: error,
    });
  }
}

function needsOf(
  dependsOn: BatchMember['dependsOn'],
  index: number,
  label: string,
  name: string | undefined,
): Map<string, boolean> {
  const needs = new Map<string, boolean>();
  if (dependsOn === undefined) return needs;
  const field = `[${index}].dependsOn`;
  if (!Array.isArray(dependsOn))
    throw new InvalidBatchError(`${label}: dependsOn must be an array of names`, field, named(name));
  for (const given of dependsOn as NonNullable<BatchMember['dependsOn']>) {
    const edge = typeof given === 'string' ? { name: given, on: 'completed' as const } : given;
    if (
      typeof edge !== 'object' ||
      edge === null ||
      !isName(edge.name) ||
      !['completed', 'finished'].includes(edge.on)
    ) {
      throw new InvalidBatchError(
        `${label}: dependsOn holds ${JSON.stringify(given)}: each must be a name, or { name, on: 'completed' | 'finished' }`,
        field,
        named(name),
      );
    }
    if (edge.name === name) {
      throw new InvalidBatchError(`${label} depends on itself`, field, [edge.name]);
    }
    const any = edge.on === 'finished';
    if ((needs.get(edge.name) ?? any) !== any) {
      throw new InvalidBatchError(
        `${label} depends on ${JSON.stringify(edge.name)} both completed and finished: say which`,
        field,
        [edge.name],
      );
    }
    needs.set(edge.name, any);
  }
  return needs;
}

function refuseDuplicates(planned: PlannedMember[]): Map<string, PlannedMember> {
  const byName = new Map<string, PlannedMember>();
  const twice = new Set<string>();
  for (const member of planned) {
    if (member.name === undefined) continue;
    if (byName.has(member.name)) twice.add(member.name);
    byName.set(member.name, member);
  }
  if (twice.size > 0) {
    throw new InvalidBatchError(`names are given twice: ${list([...twice])}`, 'name', [...twice]);
  }
  return byName;
}

function refuseUnknown(planned: PlannedMember[], byName: Map<string, PlannedMember>, known: boolean): void {
  let edges = 0;
  const unknown = new Set<string>();
  for (const { needs } of planned) {
    edges += needs.size;
    if (!known) for (const name of needs.keys()) if (!byName.has(name)) unknown.add(name);
  }
  if (unknown.size > 0) throw unknownNames([...unknown], [...byName.keys()]);
  if (edges > MAX_EDGES) {
    throw new InvalidBatchError(
      `${edges} dependencies are more than ${MAX_EDGES}: let a hook (onCompleted) run what waits for all`,
      'dependsOn',
    );
  }
}

export const unknownNames = (names: string[], candidates: readonly string[]): InvalidBatchError =>
  new InvalidBatchError(
    `there is no member ${list(names)} to depend on${names.length === 1 && candidates.length <= 1000 ? didYouMean(names[0] ?? '', candidates) : ''}`,
    'dependsOn',
    names,
  );

/** Kahn's: whoever needs nothing more comes next, in the order given. */
function inOrder(planned: PlannedMember[], byName: Map<string, PlannedMember>): PlannedMember[] {
  if (planned.every(({ needs }) => needs.size === 0)) return planned;
  const left = new Map<PlannedMember, number>();
  const behind = new Map<PlannedMember, PlannedMember[]>();
  for (const member of planned) {
    let count = 0;
    for (const name of member.needs.keys()) {
      const need = byName.get(name);
      if (!need) continue;
      count++;
      const others = behind.get(need);
      if (others) others.push(member);
      else behind.set(need, [member]);
    }
    left.set(member, count);
  }
  const order = planned.filter((member) => left.get(member) === 0);
  for (const member of order) {
    for (const next of behind.get(member) ?? []) {
      const count = (left.get(next) ?? 0) - 1;
      left.set(next, count);
      if (count === 0) order.push(next);
    }
  }
  if (order.length === planned.length) return order;
  const done = new Set(order);
  const cycle = cycleIn(
    planned.filter((member) => !done.has(member)),
    byName,
    done,
  );
  throw new InvalidBatchError(
    `members depend on one another in a circle: ${[...cycle, cycle[0]].map((name) => JSON.stringify(name)).join(' → ')}`,
    'dependsOn',
    cycle,
  );
}

/** Every one that is left needs another that is left: following those, one comes round again. */
function cycleIn(left: PlannedMember[], byName: Map<string, PlannedMember>, done: Set<PlannedMember>): string[] {
  const path: PlannedMember[] = [];
  const seen = new Map<PlannedMember, number>();
  for (let at = left[0]; at;) {
    const before = seen.get(at);
    if (before !== undefined) return path.slice(before).map(({ name }) => name ?? '');
    seen.set(at, path.length);
    path.push(at);
    at = [...at.needs.keys()].map((name) => byName.get(name)).find((need) => need !== undefined && !done.has(need));
  }
  return [];
}

const named = (name: string | undefined): string[] => (name === undefined ? [] : [name]);

const list = (names: string[]): string =>
  names
    .slice(0, LISTED)
    .map((name) => JSON.stringify(name))
    .join(', ') + (names.length > LISTED ? ` and ${names.length - LISTED} more` : '');
