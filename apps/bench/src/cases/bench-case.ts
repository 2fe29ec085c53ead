import type { ContenderName } from '../contenders/contender';
import type { Lab } from '../lab';
import type { Measurement } from '../measure/measurement';
import type { Plan } from '../plan';

export interface CaseContext {
  lab: Lab;
  plan: Plan;
  contender: ContenderName;
  /** The values of this round so far, by `case:contender`, for cases that compare with another one. */
  soFar: Map<string, number>;
}

/** Something to measure. */
export interface BenchCase {
  name: string;
  title: string;
  unit: string;
  better: 'higher' | 'lower';
  /** Who is measured; nobody = not in this plan. */
  contenders: (plan: Plan) => readonly ContenderName[];
  /** Peers that are represented by the limit in their documentation instead. */
  documented?: readonly ContenderName[];
  /** It repeats itself: run in the first round only. */
  once?: boolean;
  /** @returns one measurement, or several of a case that repeats itself */
  run: (context: CaseContext) => Promise<Measurement | Measurement[]>;
}
